# SPDX-License-Identifier: Apache-2.0
"""The ops in numpy, with every rounding of the kernels. Tests and users compare results with them bit for bit.

The collectives take a list with one numpy array for each rank. If all ranks get the same result, they return that,
otherwise a list with the result of each rank; `df.allreduce_many` is `allreduce` of each tensor. `rmsnorm_fp8` and the
modules `gemv` and `coat_...` have the ops on one device. `bits` views arrays of any dtype as unsigned integers, for
comparison bit for bit. Nothing here needs a driver.
"""

from . import coat_groups as coat_groups
from . import coat_layernorm as coat_layernorm
from . import coat_rmsnorm as coat_rmsnorm
from . import gemv as gemv
from .arithmetic import bits as bits
from .arithmetic import round_to as round_to
from .moves import all_gather as all_gather
from .moves import all_to_all as all_to_all
from .moves import broadcast as broadcast
from .norm import normalise as normalise
from .norm import rmsnorm_fp8 as rmsnorm_fp8
from .norm import row_sum as row_sum
from .norm import row_sum_of_squares as row_sum_of_squares
from .quantised import Quantised as Quantised
from .quantised import dequantise as dequantise
from .quantised import quantisation as quantisation
from .quantised import quantise as quantise
from .quantised import scales_by_row as scales_by_row
from .rows import Normalised as Normalised
from .rows import allreduce_rmsnorm_fp8 as allreduce_rmsnorm_fp8
from .rows import reduce_scatter_rmsnorm_fp8 as reduce_scatter_rmsnorm_fp8
from .sums import allreduce as allreduce
from .sums import reduce_scatter as reduce_scatter
from .sums import sum_bounds as sum_bounds
from .sums import sum_ranks as sum_ranks
