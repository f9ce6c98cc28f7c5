"""Tests whether a hub or a client in any language keeps PROTOCOL.md: ``cd tests && python -m conformance.kit -h``."""
