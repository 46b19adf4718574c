"""A kernel's image or a guest's RAM to a Kernel."""
