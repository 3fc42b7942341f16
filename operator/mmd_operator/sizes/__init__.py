"""How many replicas there may be: GPU budgets, shares of revisions, growth under way, groups, replacements. Mostly pure; writes nothing."""
