"""The round loop: draft, verify, commit; KV rollback, sampling, stopping, statistics."""
