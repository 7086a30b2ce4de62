"""Model families, a file each: what a checkpoint's config.json and tensor names mean."""
