"""Embedded worlds: small places to train in, where a renderer knows what every clip should look like."""
