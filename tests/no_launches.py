"""For the scripts in `on_the_cpu`."""


def refuse_launches(*modules):
    """Let these modules of kernels launch none: what would, ends the script."""
    for module in modules:
        assert module.launch
        module.launch = _refuse


def _refuse(*args, **options):
    raise SystemExit("our kernel was launched")
