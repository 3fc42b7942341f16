"""Basics for all packages of the gateway: errors of its APIs, strict models, bodies under limits, memory held by requests."""
