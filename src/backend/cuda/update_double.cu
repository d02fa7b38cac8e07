// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/update.hpp"

namespace ga::cuda {

template void update<double>(const Queue&, const UpdateTask*, const ListPart&);
template void measure<double>(const Queue&, const UpdateTask*, const ListPart&,
                              const ScalarTables&);

}  // namespace ga::cuda
