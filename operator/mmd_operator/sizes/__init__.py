"""Limits on replicas: GPU budgets, shares of revisions, pending growth, groups, replacements. Mostly pure; writes nothing."""
