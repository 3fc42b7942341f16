"""What bytes of one format say by themselves. Opens and decodes nothing, and knows no policy."""
