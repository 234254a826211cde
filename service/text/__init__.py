"""Text: tokenizing, streaming detokenizing, chat templates."""
