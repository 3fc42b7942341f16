"""When a deployment is looked at and what a pass over it does, from the first look to its removal. Independent of kopf."""
