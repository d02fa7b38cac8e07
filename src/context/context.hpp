// SPDX-License-Identifier: Apache-2.0
// What a ga_context is: a lock, a model, and the stages that work on it. It computes nothing itself.
//   model/        what the stages share: parameters, their arrays, the tables of the backend, the window, counters
//   window/       contributions to a window
//   batchnorm/    layers with batch normalisation
//   ranks/        what is done together with other ranks
//   step/         the end of a window, the update of parameters and state, and updates ahead of it
//   checkpoint/   state by name, and on disk
//   context/      groups, parameters, clips, moving averages
#pragma once

#include <atomic>
#include <memory>

#include "core/concurrent_calls.hpp"
#include "core/fork.hpp"
#include "core/fp_mode.hpp"
#include "core/log.hpp"
#include "ranks/stages.hpp"
#include "window/accumulator.hpp"

namespace ga {

class Averages;
class BatchNorms;
class Comm;
class Configuration;
class Copies;
class NamedState;
class Parameters;
class Preparation;
class RankState;
class Step;
class TableWriter;

// Members stand in the order in which they are made, each of those before it; they are destroyed in the opposite one.
class Context {
 private:
  static constexpr uint64_t kMark = uint64_t{0x6743'7458} << 32;
  std::atomic<uint64_t> mark_{kMark + process_generation()};  // 0 once it is destroyed
  mutable uint64_t calls_ = 0;                                // that may have changed something
  const std::unique_ptr<ConcurrentCalls> callers_;  // NULL: one thread at a time, in any call
  const std::unique_ptr<Log> log_;

 public:
  explicit Context(const ga_config& config);
  ~Context();

  Model model;

 private:
  const std::unique_ptr<TableWriter> writer_;
  const std::unique_ptr<Copies> copies_;
  const std::unique_ptr<Preparation> preparation_;

 public:
  Accumulator accumulator{model, *writer_, *preparation_, callers_.get(), calls_};
  const std::unique_ptr<BatchNorms> layers;
  const Stages stages{model, *writer_, *preparation_, *copies_, accumulator, *layers};
  const std::unique_ptr<Configuration> configuration;
  const std::unique_ptr<Parameters> parameters;
  const std::unique_ptr<Averages> averages;
  const std::unique_ptr<NamedState> state;
  const std::unique_ptr<Step> step;

  // Whether this is a context that has not been destroyed, and that this process made, not its parent (see
  // fork.hpp).
  bool is_of_this_process() const {
    return mark_.load(std::memory_order_relaxed) == kMark + process_generation();
  }

  // Held during a call, which computes in the library's floating-point mode. Throws if the context
  // belongs to the parent process, is in another call, or has failed for good. changing: throws, too,
  // while parameters and EMA are exchanged. function: the one that was called.
  class Use {
   public:
    Use(const Context& context, const char* function, bool changing);
    ~Use() { context_.in_use_.store(false, std::memory_order_release); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const FpMode mode_;
    const Context& context_;
  };

  // A call of ga_accumulate_part or ga_params_ready, beside which other threads may make such calls
  // (ga_config.eager).
  class SharedUse {
   public:
    SharedUse(const Context& context, const char* function, bool changing);
    ~SharedUse();
    SharedUse(const SharedUse&) = delete;
    SharedUse& operator=(const SharedUse&) = delete;

   private:
    static thread_local const SharedUse* innermost_;  // of this thread's

    const FpMode mode_;
    const Context& context_;
    const SharedUse* outer_;
  };
  const ConcurrentCalls* callers() const { return callers_.get(); }  // NULL: one thread at a time

  Log* log() const { return log_.get(); }  // NULL: none
  template <class Value>
  void note(const char* key, Value value) const {
    if (log_) log_->note(key, value);
  }

  // What concerns several stages.
  void micro_abort();
  ga_memory memory() const;
  void make_arrays();
  // comm NULL: none.
  void set_comm(std::shared_ptr<Comm> comm, const ga_comm_options& options);

 private:
  void check_thread(const char* function) const;
  void check_usable(const char* function, bool changing) const;
  [[noreturn]] void fail_foreign() const;
  [[noreturn]] static void fail_in_use();

  mutable std::atomic<bool> in_use_{false};
  const std::unique_ptr<RankState> rank_state_;
};

}  // namespace ga
