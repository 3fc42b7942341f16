"""What all rooms of the gateway use: errors of its APIs, strict models, bodies under limits, memory that requests hold."""
