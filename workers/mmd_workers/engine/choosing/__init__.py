"""From logits to tokens: rules, grammars' masks, guidance, sampling, drafts. Knows no KV and no scheduling."""
