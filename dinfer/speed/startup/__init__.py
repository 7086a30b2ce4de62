"""What shortens the time to the first answer: kernels are compiled in parallel, before they are launched."""
