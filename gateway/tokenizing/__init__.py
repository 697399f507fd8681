"""Token ids at the gateway, exactly as the engine will compute them, or none at all."""
