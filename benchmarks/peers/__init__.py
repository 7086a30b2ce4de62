"""The published dInfer and this project on the same work. Each side runs in a process of its own."""
