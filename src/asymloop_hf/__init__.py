"""AsymLoop, the asymmetric looped transformer, for Hugging Face Transformers."""
