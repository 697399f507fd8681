"""HTTP in, tokens out: routes, wire models, admission, tokenizing, upstream client, errors."""
