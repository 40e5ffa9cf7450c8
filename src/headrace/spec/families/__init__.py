"""One file per Hugging Face `model_type`, named after it; each exports `build(config) -> ModelSpec`."""
