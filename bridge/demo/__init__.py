"""What the demonstration and the quality measurements need: a small real language model, paged caches, and text."""
