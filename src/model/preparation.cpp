// SPDX-License-Identifier: Apache-2.0
#include "model/preparation.hpp"

#include <new>
#include <stdexcept>

#include "model/table_writer.hpp"

namespace ga {

int64_t Preparation::bytes_of_lists(size_t params) const {
  const size_t words = model_.config.device == GA_DEVICE_CPU ? 0 : 3 * sizeof(Word);
  return model_.speculation->list_bytes(params) +
         static_cast<int64_t>(params * (sizeof(Param) + sizeof(Tensor) + sizeof(Source) +
                                        sizeof(AccumulateTask) + 2 * sizeof(void*) +
                                        2 * sizeof(int64_t) + 11 * sizeof(ga_param) + words));
}

void Preparation::make_lacking() {
  model_.check_device();
  model_.ranks->divide();
  const size_t n = model_.params.size();
  ContextTables tables;
  try {
    writer_.reserve(n);
    for (HasLists* const stage : stages_) stage->reserve(n);
    tables = model_.tables.grown(*model_.backend, ContextTables::kParam, n);
    model_.arrays.make();
  } catch (const std::bad_alloc&) {
    model_.arrays.fail_allocation();
  } catch (const std::length_error&) {  // of a list that would have been larger than memory
    model_.arrays.fail_allocation();
  }
  model_.tables.swap(tables, ContextTables::kParam);
  for (size_t i = 0; i < n; ++i) writer_.describe(i);  // the tables have moved
  model_.speculation->look_again();
  writer_.set_tables();
  writer_.flush();
}

}  // namespace ga
