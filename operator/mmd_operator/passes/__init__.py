"""The reconcile passes over a deployment: when they run and what they do, from its creation to its removal. Independent of kopf."""
