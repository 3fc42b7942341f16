"""Turns logits into tokens: rules, grammar masks, guidance, sampling, drafts. Knows no KV and no scheduling."""
