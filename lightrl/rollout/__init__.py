"""The way from prompts to scored samples."""
