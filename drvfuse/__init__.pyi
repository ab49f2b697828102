# SPDX-License-Identifier: Apache-2.0
# The public names, here and nowhere else: `lazy` reads these lines too, and says which forms they have.

from . import coat as coat
from . import config as config
from . import dtypes as dtypes
from . import emu as emu
from . import errors as errors
from . import reference as reference
from . import reference_gemv as reference_gemv
from .comm.group import Group as Group
from .comm.rank import Rank as Rank
from .comm.rank_graphs import RankGraphs as RankGraphs
from .ops.call.epilogue import Epilogue as Epilogue
from .ops.call.epilogue import Replicated as Replicated
from .ops.call.epilogue import float32 as float32
from .ops.call.epilogue import int32 as int32
from .ops.call.options import PDLLevel as PDLLevel
from .ops.call.scratch import check_device as check_device
from .ops.collectives.moves.all_gather import Gathered as Gathered
from .ops.collectives.moves.all_gather import all_gather as all_gather
from .ops.collectives.moves.all_to_all import all_to_all as all_to_all
from .ops.collectives.moves.broadcast import broadcast as broadcast
from .ops.collectives.rows.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8 as allreduce_rmsnorm_fp8
from .ops.collectives.rows.reduce_scatter_rmsnorm_fp8 import reduce_scatter_rmsnorm_fp8 as reduce_scatter_rmsnorm_fp8
from .ops.collectives.sums.allreduce import allreduce as allreduce
from .ops.collectives.sums.allreduce_many import allreduce_many as allreduce_many
from .ops.collectives.sums.reduce_scatter import reduce_scatter as reduce_scatter
from .ops.gemv.gemv_partial_norm import gemv_partial_norm as gemv_partial_norm
from .ops.norm.rmsnorm_fp8 import rmsnorm_fp8 as rmsnorm_fp8
from .plans.quantisation import Quantisation as Quantisation
from .runtime.array import Array as Array
from .runtime.array import view as view
from .runtime.device import Device as Device
from .runtime.device import device as device
from .runtime.driver import last_calls as last_calls
from .runtime.graph import Graph as Graph
from .runtime.interop import ArrayLike as ArrayLike
from .runtime.kernel import Kernel as Kernel
from .runtime.launch import Launch as Launch
from .runtime.module import Module as Module
from .runtime.module import compile as compile
from .runtime.multicast import Multicast as Multicast
from .runtime.stream import Event as Event
from .runtime.stream import Stream as Stream
from .runtime.vmm import SymmetricBuffer as SymmetricBuffer
from .trace.buffer import Trace as Trace

__version__: str
