"""An OpenAI-compatible endpoint in the rank's process, which records every token that an agent's calls produced."""
