"""The user's own data: tables, images, texts, tokens; predictions and exports."""
