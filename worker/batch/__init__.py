"""A batch's layout on a device, and a result on its way back."""
