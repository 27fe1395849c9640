"""What a step need not do again: fill its table of addresses, and think about its launches."""

from threading import get_ident

from course_lib.kernels import optimizers
from course_lib.runtime.host import arrays
from course_lib.runtime.host import launch as launching

_PLAIN = {float, int, bool, type(None)}


class Seen:
    """Tensors that a step has been made with. To be kept for as long as a graph has the step."""

    def __init__(self):
        self.table, self.filled = optimizers.Table(), False
        self.addresses = self.numbers = self.launches = None

    def run(self, launcher, addresses, numbers, index):
        """``launcher(table=…, again=…)``, or what it launched with the same numbers before.

        addresses  where the gradients lie now
        numbers    all that the launches depend on beside the tensors and where they run
        index      of the tensors' GPU
        """
        if self.filled and addresses != self.addresses:
            self.table.move_gradients(addresses)
        self.addresses = addresses
        stream = launching._stream_of(index) if index >= 0 else 0
        numbers = stream, get_ident(), *numbers
        # A learning rate that is a tensor may hold another number each time.
        can_repeat = self.filled and launching.on_gpu() and _PLAIN.issuperset(map(type, numbers))
        if can_repeat and numbers == self.numbers:
            self._repeat(launcher)
        else:
            launcher(table=self.table, again=self.filled)
            self.filled = True
            self.numbers, self.launches = numbers if can_repeat else None, None

    def _repeat(self, launcher):
        if self.launches is None:
            with launching.recorded() as launches:
                launcher(table=self.table, again=True)
            self.launches = [_prepared(*launch) for launch in launches]
        else:
            for prepared, addresses in self.launches:
                prepared.launch(addresses)


def _prepared(kernel, grid, block, args, options):
    """(a `PreparedLaunch`, the addresses it takes) of what has been launched."""
    addresses = [arg.data_ptr() for arg in args if arrays.is_tensor(arg)]
    return launching.prepare(kernel, grid, block, *args, **options), addresses
