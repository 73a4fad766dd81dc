"""The guard and learning from labels, on streams of which a share is labelled."""
