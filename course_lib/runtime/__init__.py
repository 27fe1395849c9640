"""The ground floor: what device is here, how a kernel is compiled and launched."""
