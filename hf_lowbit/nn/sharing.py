"""Layers that read the same x share its preparation: q, k and v, gate and up, the keys and values of an encoder's
output.

What happens decides, not what a layer is called. Two low-bit layers of one scheme and width that get the very same
tensor, one after the other with no third input between them, are noted: the first is the head, the others are its
followers. The next call of the head makes one call of the kernel, which prepares x once and multiplies it with the
weights of all; each follower takes its product when it is called. Every layer keeps its own tensors, and every result
has the bits of the product alone (functional/several.py).

A product is only taken by the layer whose weights made it, for the tensor object it was made from, in the thread that
made it, while nothing has written to either (torch counts writes; those through `.data` or another library's view it
does not see), under the same forced kernel. So what was noted decides about speed, never about results. Products that
nobody takes go when x goes or the thread's next shared input comes; a head to which that happens `TRIES` times is left
alone.

Nothing is shared where it would be seen or has no place: while gradients are recorded, under torch.compile, export,
tracing, autocast or inference mode (whose tensors do not count writes), for a follower with forward pre-hooks, a
wrapped `forward` or weights that are elsewhere or of another form, in `separate_products` or with HF_LOWBIT_SHARE=0,
and by kernels that don't bring it. Nor with fewer than `FEWEST_ROWS` rows: one token is prepared in a microsecond or
two, and finding out that a product waits costs as much (docs/performance.md).
"""

from __future__ import annotations

import itertools
import threading
import weakref

import torch
from torch import Tensor, nn

from ..functional.dispatch import forced_kernel
from ..functional.several import MOST_WEIGHTS, is_shared, linear_several
from .packed import LowBitModule, PackedWeight


# with fewer, what is shared is worth no more than the sharing (benchmarks/shared_input.py)
FEWEST_ROWS = 16
# calls of a head before it is taken to have no followers, and heads' products that were not taken before none are made
TRIES = 3
_keys = itertools.count()
# a product may be dropped, and its head told so, wherever memory is given back: also while the lock is held
_lock = threading.RLock()


class Link:
    """What a layer has learned about its neighbours, under `sharing` of its module; a copy of the module starts anew.

    `followers`: of a head, (weak reference, how its weight was packed). `head`: of a follower, the weak reference to
    its head. `calls`: with which the layer began a new input, until it has a follower. `wasted`: calls whose products
    were not all taken. `note`: why nothing was shared at the last call.
    """

    __slots__ = ("module", "packed", "followers", "head", "calls", "wasted", "key", "note")

    def __init__(self, module: LowBitModule | None = None):
        self.module = None if module is None else weakref.ref(module)
        self.packed = None if module is None else module.lowbit["weight"]
        self.followers: tuple[tuple[weakref.ref, PackedWeight], ...] = ()
        self.head: weakref.ref | None = None
        self.calls, self.wasted, self.key, self.note = 0, 0, next(_keys), None

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return type(None), ()

    def follow(self, head: Link) -> bool:
        """Become a follower of `head` if the two agree."""
        a, b = self.packed, head.packed
        if a.scheme != b.scheme or a.in_features != b.in_features or len(head.followers) + 1 >= MOST_WEIGHTS:
            return False
        # those who followed this layer read the same x, and will find the head themselves
        self.release()
        with _lock:
            if self.head is None:
                head.followers += ((self.module, a),)
                head.key, self.head = next(_keys), head.module
        return True

    def release(self) -> None:
        """Forget the followers, who are free to learn again."""
        with _lock:
            for reference, _ in self.followers:
                link = sharing_of(reference())
                if link is not None and link.head is self.module:
                    link.head, link.calls = None, 0
            self.followers, self.calls = (), 0

    def waste(self) -> None:
        """Note that a product was not taken."""
        self.wasted += 1
        self.release()
        if self.wasted >= TRIES:
            self.calls, self.note = TRIES, "its neighbours are not called with its input each time"


class Input(weakref.ref):
    """The tensor that a thread's last layers were called with: who began with it, and the products that wait.

    It is a weak reference to x, with what tells that x is still the same: in place, torch counts every change but that
    of `x.data`, which has another address or dtype.
    """

    __slots__ = ("version", "address", "dtype", "forced", "heads", "products")

    def __init__(self, x: Tensor, callback):
        super().__init__(x, callback)
        self.version, self.address, self.dtype = x._version, x.data_ptr(), x.dtype
        self.forced = forced_kernel()
        self.heads: list[Link] = []
        # by layer: its product, the head, and what it was made of: weight, scale, zero point, bias, and their versions
        self.products: dict[nn.Module, tuple] = {}


class _Thread(threading.local):
    input: Input | None = None


_thread = _Thread()


def sharing_of(module: nn.Module | None) -> Link | None:
    """What `module` has learned, or None."""
    return None if module is None else module.__dict__.get("sharing")


def take_product(module: LowBitModule, x: Tensor) -> Tensor | None:
    """x W^T + bias of a layer, if it shares its input; None if it has to compute its product alone.

    For calls on a CPU with `FEWEST_ROWS` rows or more that nothing records or traces, without autocast.
    """
    link = module.__dict__.get("sharing")
    if link is None or link.packed is not module.lowbit["weight"]:
        link = module.__dict__["sharing"] = Link(module)
    if link.calls >= TRIES and not link.followers:
        return None
    if x.is_inference() or not is_shared():
        link.note = "inputs made in inference mode don't tell when they change" if is_shared() else "switched off"
        return None
    link.note = None
    now = _thread.input
    if (
        now is None or now() is not x or now.version != x._version or now.address != x.data_ptr()
        or now.dtype is not x.dtype or now.forced != forced_kernel()
    ):  # fmt: skip
        if now is not None and now.products:
            _drop(now)
        now = _thread.input = Input(x, _drop)
    elif now.products:
        made = now.products.pop(module, None)
        if made is not None and _are_still(module._parameters, made):
            return made[0]
    if link.head is not None:
        # a head that met an obstacle has made none
        if link.head() is None:
            link.head = None
        return None
    if link not in now.heads:
        if any(link.follow(head) for head in now.heads):
            return None
        # who comes later with this x may still follow
        now.heads.append(link)
        link.calls += not link.followers
    return _multiply(module, link, x, now) if link.followers else None


def _multiply(module: LowBitModule, link: Link, x: Tensor, now: Input) -> Tensor | None:
    """The head's product; those of its followers wait in `now`."""
    followers, weights, device = [], [_tensors(module._parameters)], x.device
    for reference, packed in link.followers:
        follower = reference()
        if follower is None or follower.__dict__.get("lowbit", {}).get("weight") is not packed:
            link.release()
            return None
        tensors = _tensors(follower._parameters)
        weight = tensors[0]
        if follower._forward_pre_hooks or "forward" in follower.__dict__:
            link.note = "a neighbour has forward pre-hooks or a wrapped `forward`"
        elif type(weight) is not nn.Parameter or weight.dtype is not torch.int8 or weight.device != device:
            link.note = "a neighbour's weights are elsewhere or of another form"
        elif weight.is_inference():
            link.note = "weights made in inference mode don't tell when they change"
        else:
            followers.append(follower)
            weights.append(tensors)
            continue
        return None
    results = linear_several(x, weights, *link.packed.product, link.key)
    if type(results) is str:
        link.note = results
        return None
    for index, follower in enumerate(followers, 1):
        weight, scale, zero_point, bias = tensors = weights[index]
        now.products[follower] = (
            results[index], link, *tensors, weight._version, scale._version,
            None if zero_point is None else zero_point._version, None if bias is None else bias._version,
        )  # fmt: skip
    return results[0]


def _tensors(parameters: dict) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Packed weight, scales, zero points and bias of a layer."""
    return (
        parameters["weight"], parameters["weight_scale"], parameters["weight_zero_point"], parameters["bias"],
    )  # fmt: skip


def _are_still(parameters: dict, made: tuple) -> bool:
    """Whether a layer has the very tensors that a product was made of, and nothing has written to them since."""
    _, _, weight, scale, zero_point, bias, weight_version, scale_version, zero_version, bias_version = made
    return (
        parameters["weight"] is weight and weight._version == weight_version
        and parameters["weight_scale"] is scale and scale._version == scale_version
        and parameters["weight_zero_point"] is zero_point
        and (zero_point is None or zero_point._version == zero_version)
        and parameters["bias"] is bias and (bias is None or bias._version == bias_version)
    )  # fmt: skip


def _drop(gone: Input) -> None:
    """Let go of what nobody took. Called when x goes, in whichever thread that happens."""
    products, wasted = gone.products, []
    while products:
        try:
            link = products.popitem()[1][1]
        except KeyError:
            # the thread it was made for took the last one
            break
        if link not in wasted:
            wasted.append(link)
    for link in wasted:
        link.waste()


def explain_sharing(module: nn.Module, names: dict[int, str]) -> str | None:
    """With whom a layer shares its input, or why not; None before calls with `FEWEST_ROWS` rows were seen. `names`: of
    the model's modules by id."""
    link = sharing_of(module)
    if link is None:
        return None
    if link.note is not None and (link.followers or link.calls or link.head is None):
        return f"input not shared: {link.note}"
    if link.followers:
        others = _names([reference() for reference, _ in link.followers], names)
        return f"from {FEWEST_ROWS} rows on prepares its input for {others} too"
    if link.head is not None:
        return f"from {FEWEST_ROWS} rows on its input is prepared by {_names([link.head()], names)}"
    return "input not shared: no other layer of its scheme reads it" if link.calls >= TRIES else None


def _names(modules: list[nn.Module | None], names: dict[int, str]) -> str:
    """The last parts of modules' names: rows of a report that say the same become one."""
    return ", ".join(f"`{names.get(id(m), 'a layer outside of the model').rpartition('.')[2]}`" for m in modules)
