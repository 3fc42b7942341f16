"""The spec of a MultimodalDeployment: the single source of truth for the CRD, the operator, the workers and the local runner.

Field names carry their units, fractions are percentages or milli integers, and every list and string is bounded (CEL cost and
object size depend on it).

Each file has the models of one part of the spec and, above them, the rules between their fields.
"""
