// libgradaccum for C++17: ownership, types and exceptions over gradaccum.h, header only.
// SPDX-License-Identifier: Apache-2.0
//
// Every C function can be called through this header, and gradaccum.h describes what it does. Names
// are those of C without ga_, and without a noun that follows from the object or the arguments:
// ga_step is Context::step, ga_group_set_lr is Context::set_lr, ga_group_add is Context::add_group,
// ga_accumulate_part is MicroBatch::accumulate_part. What C++ adds:
//
//   Context        owns a ga_context. It can be moved, but not copied.
//   MicroBatch     an open micro-batch, which ends with its scope. If an exception leaves the
//                  scope, the window is discarded: half a micro-batch never reaches a step.
//   Accumulator, EmaScope      what must be released or swapped back, in the same way.
//   Group, Param, BatchNorm    ids, each of its own type.
//   float*, ...    imply their dtype. DtypeOf adds types of the program's own, such as a bfloat16.
//   Config         a ga_config whose parallel_for, log and on_param_done may be any callable.
//   Error          thrown by every call whose status is not GA_OK.
//   default_...()  structs with struct_size and all defaults filled in.
//
//     gradaccum::Context context;
//     ga_optimizer adamw = gradaccum::default_optimizer(GA_OPTIMIZER_ADAMW);
//     adamw.lr = 3e-4;
//     const gradaccum::Group group = context.add_group(adamw);
//     const gradaccum::Param w = context.add_param(group, "fc1.weight", w1.data(), {512, 784});
//     const gradaccum::Param b = context.add_param(group, "fc1.bias", b1.data(), {512});
//     for (each window) {
//       for (each micro-batch of the window) {
//         backward();
//         context.accumulate({dw1.data(), db1.data()}, samples_in_this_micro_batch);
//       }
//       context.step();
//     }
//
// Layer by layer, the body of the inner loop is:
//
//     gradaccum::MicroBatch micro = context.micro_begin(-1, samples_in_this_micro_batch);
//     backward_of_bias();
//     micro.accumulate_part(b, db1.data());
//     backward_of_weight();
//     micro.accumulate_part(w, dw1.data());
//
// The C functions take a Context by get() and an id by id(), so the two APIs may be mixed.
#ifndef GRADACCUM_GRADACCUM_HPP_
#define GRADACCUM_GRADACCUM_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__STDCPP_FLOAT16_T__) || defined(__STDCPP_BFLOAT16_T__)
#include <stdfloat>
#endif

#include "gradaccum/gradaccum.h"

namespace gradaccum {

// ---- Errors -------------------------------------------------------------------------------------

// what() is the name of the status and the message of ga_last_error().
class Error : public std::runtime_error {
 public:
  Error(ga_status status, const std::string& message)
      : std::runtime_error(std::string(ga_status_name(status)) + ": " + message), status_(status) {}
  ga_status status() const noexcept { return status_; }

 private:
  ga_status status_;
};

// Throws an Error unless status is GA_OK. For direct calls of C functions.
inline void check(ga_status status) {
  if (status != GA_OK) throw Error(status, ga_last_error());
}

// ---- Types --------------------------------------------------------------------------------------

enum class Group : ga_group {};
enum class Param : ga_param {};
enum class BatchNorm : ga_bn {};

// An id as the C functions take it, and as an index of the program's own arrays.
constexpr ga_group id(Group group) noexcept { return static_cast<ga_group>(group); }
constexpr ga_param id(Param param) noexcept { return static_cast<ga_param>(param); }
constexpr ga_bn id(BatchNorm bn) noexcept { return static_cast<ga_bn>(bn); }

inline constexpr Param no_param{-1};  // in place of gamma or beta

// The ga_dtype of a C++ type. A program specialises it for its own types of 16 bits:
//
//     template <>
//     struct gradaccum::DtypeOf<my::bfloat16> {
//       static constexpr ga_dtype value = GA_BF16;
//     };
template <typename T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr ga_dtype value = GA_F32;
};
template <>
struct DtypeOf<double> {
  static constexpr ga_dtype value = GA_F64;
};
template <>
struct DtypeOf<std::int32_t> {
  static constexpr ga_dtype value = GA_I32;
};
template <>
struct DtypeOf<std::int64_t> {
  static constexpr ga_dtype value = GA_I64;
};
#ifdef __STDCPP_FLOAT16_T__
template <>
struct DtypeOf<std::float16_t> {
  static constexpr ga_dtype value = GA_F16;
};
#endif
#ifdef __STDCPP_BFLOAT16_T__
template <>
struct DtypeOf<std::bfloat16_t> {
  static constexpr ga_dtype value = GA_BF16;
};
#endif

template <typename T>
inline constexpr ga_dtype dtype_of = DtypeOf<std::remove_cv_t<T>>::value;

// ---- Structs with their defaults ----------------------------------------------------------------

namespace detail {

// What an _init function gives. Where the library is older than this header, it does not know the
// last fields: they are 0, and struct_size still counts them, so that it refuses them if they are
// set.
template <typename T, typename Init, typename... Arguments>
T defaults(Init init, Arguments... arguments) {
  T filled{};
  check(init(&filled, sizeof filled, arguments...));
  filled.struct_size = sizeof filled;
  return filled;
}

// What a function takes that stores state: a ga_state_options, or nothing for the defaults.
class StateOptions {
 public:
  StateOptions() = default;
  StateOptions(const ga_state_options& options) : options_(&options) {}
  // Deprecated, for programs that pass a pointer.
  StateOptions(const ga_state_options* options) : options_(options) {}
  operator const ga_state_options*() const { return options_; }

 private:
  const ga_state_options* options_ = nullptr;
};

// Carries an exception of a callable past the C function that has called it.
class Relay {
 public:
  template <typename Body>
  std::int32_t run(Body&& body) noexcept {
    try {
      body();
      return 0;
    } catch (...) {
      thrown_ = std::current_exception();
      return 1;
    }
  }
  void rethrow() const {
    if (thrown_) std::rethrow_exception(thrown_);
  }

 private:
  std::exception_ptr thrown_;
};

}  // namespace detail

inline ga_config default_config() { return detail::defaults<ga_config>(ga_config_init); }

inline ga_optimizer default_optimizer(ga_optimizer_kind kind, ga_flavor flavor = GA_FLAVOR_TORCH) {
  return detail::defaults<ga_optimizer>(ga_optimizer_init, kind, flavor);
}

inline ga_schedule default_schedule(ga_schedule_kind kind) {
  return detail::defaults<ga_schedule>(ga_schedule_init, kind);
}

inline ga_clip default_clip() { return detail::defaults<ga_clip>(ga_clip_init); }

inline ga_loss_scaler default_loss_scaler() {
  return detail::defaults<ga_loss_scaler>(ga_loss_scaler_init);
}

inline ga_ema default_ema() { return detail::defaults<ga_ema>(ga_ema_init); }

inline ga_bn_options default_bn_options(ga_flavor flavor = GA_FLAVOR_TORCH) {
  return detail::defaults<ga_bn_options>(ga_bn_options_init, flavor);
}

inline ga_param_options default_param_options() {
  return detail::defaults<ga_param_options>(ga_param_options_init);
}

inline ga_flat_entry default_flat_entry() {
  return detail::defaults<ga_flat_entry>(ga_flat_entry_init);
}

inline ga_micro_options default_micro_options() {
  return detail::defaults<ga_micro_options>(ga_micro_options_init);
}

inline ga_state_options default_state_options() {
  return detail::defaults<ga_state_options>(ga_state_options_init);
}

inline ga_comm_config default_comm_config(ga_comm_kind kind) {
  return detail::defaults<ga_comm_config>(ga_comm_config_init, kind);
}

inline ga_comm_options default_comm_options() {
  return detail::defaults<ga_comm_options>(ga_comm_options_init);
}

// ---- Library ------------------------------------------------------------------------------------

inline std::int32_t version() noexcept { return ga_version(); }
inline const char* build_info() noexcept { return ga_build_info(); }
inline ga_build build() {
  auto build = detail::defaults<ga_build>(ga_build_init);
  check(ga_build_describe(&build));
  return build;
}

// If it returns 0, ga_last_error() says why.
inline std::int32_t device_count(ga_device device) {
  std::int32_t count = 0;
  check(ga_device_count(device, &count));
  return count;
}

// The note in a file that was saved; "" if there is none.
inline std::string state_note(const std::string& path) {
  std::size_t size = 0;
  check(ga_state_note(path.c_str(), nullptr, 0, &size));
  std::string note(size, '\0');
  if (size > 0) check(ga_state_note(path.c_str(), note.data(), note.size(), &size));
  return note.substr(0, size > 0 ? size - 1 : 0);
}

// ---- Configuration ------------------------------------------------------------------------------

// Runs item index of a parallel loop: task(index). Cheap to copy.
class Task {
 public:
  Task(ga_task task, void* data) noexcept : task_(task), data_(data) {}
  void operator()(std::int64_t index) const { task_(data_, index); }

 private:
  ga_task task_;
  void* data_;
};

// A ga_config, and the callables that it was given. All contexts made from it share them, and keep
// them alive. An exception must not leave a callable: it would have to cross C, so it ends the
// program with std::terminate, as in the parallel algorithms of the standard library.
//
//     gradaccum::Config config;
//     config.num_threads = pool.size();
//     config.set_parallel_for([&pool](std::int64_t count, gradaccum::Task task) {
//       pool.run(count, task);  // task(i) for each i in [0, count); returns when all are done
//     });
//     gradaccum::Context context(config);
class Config : public ga_config {
 public:
  Config() : Config(default_config()) {}
  Config(const ga_config& fields) noexcept : ga_config(fields) {}

  // callable(std::int64_t count, Task task): see ga_parallel_for.
  template <typename Callable>
  void set_parallel_for(Callable callable) {
    auto owned = std::make_shared<Callable>(std::move(callable));
    parallel_for = [](void* user, std::int64_t count, ga_task task, void* data) noexcept {
      (*static_cast<Callable*>(user))(count, Task(task, data));
    };
    parallel_for_user = owned.get();
    callables_.parallel_for = std::move(owned);
  }

  // callable(std::string_view line): see ga_log.
  template <typename Callable>
  void set_log(Callable callable) {
    auto owned = std::make_shared<Callable>(std::move(callable));
    log = [](void* user, const char* line) noexcept {
      (*static_cast<Callable*>(user))(std::string_view(line));
    };
    log_user = owned.get();
    callables_.log = std::move(owned);
  }

  // callable(Param param): see ga_param_done. With eager_threads it also runs on a thread of the
  // library, which must not destroy the context; it may run on several threads at once.
  template <typename Callable>
  void set_on_param_done(Callable callable) {
    auto owned = std::make_shared<Callable>(std::move(callable));
    on_param_done = [](void* user, ga_param param) noexcept {
      (*static_cast<Callable*>(user))(Param{param});
    };
    on_param_done_user = owned.get();
    callables_.on_param_done = std::move(owned);
  }

 private:
  friend class Context;
  struct Callables {
    std::shared_ptr<void> parallel_for, log, on_param_done;
  };
  Callables callables_;
};

// ---- Several ranks ------------------------------------------------------------------------------

// One rank of several that hold one window: see ga_context_set_comm. It can be moved, but not copied.
// A context keeps what it needs of it, so either may end first.
//
//     const auto comm = gradaccum::Communicator::mpi(MPI_Comm_c2f(MPI_COMM_WORLD));
//     context.set_communicator(comm);
class Communicator {
 public:
  using Id = std::vector<unsigned char>;

  explicit Communicator(const ga_comm_config& config) { check(ga_comm_create(&config, &comm_)); }
  Communicator(Communicator&& other) noexcept : comm_(std::exchange(other.comm_, nullptr)) {}
  Communicator& operator=(Communicator&& other) noexcept {
    std::swap(comm_, other.comm_);
    return *this;
  }
  ~Communicator() { ga_comm_destroy(comm_); }

  // What tells one set of ranks from any other: GA_COMM_LOCAL or GA_COMM_NCCL.
  static Id unique_id(ga_comm_kind kind = GA_COMM_LOCAL) {
    Id id(GA_COMM_ID_SIZE);
    check(ga_comm_unique_id(kind, id.data(), id.size()));
    return id;
  }
  // As one of the threads of this process that have the same id.
  static Communicator local(const Id& id, std::int32_t rank, std::int32_t ranks,
                            double timeout = default_comm_config(GA_COMM_LOCAL).timeout) {
    return with_id(GA_COMM_LOCAL, id, rank, ranks, timeout);
  }
  // As one of the ranks with a GPU each that have the same id.
  static Communicator nccl(const Id& id, std::int32_t rank, std::int32_t ranks,
                           double timeout = default_comm_config(GA_COMM_NCCL).timeout) {
    return with_id(GA_COMM_NCCL, id, rank, ranks, timeout);
  }
  // As a rank of a ncclComm_t of the program's, which must outlive the communicator.
  static Communicator nccl(void* comm, double timeout = default_comm_config(GA_COMM_NCCL).timeout) {
    ga_comm_config config = default_comm_config(GA_COMM_NCCL);
    config.nccl_comm = comm;
    config.timeout = timeout;
    return Communicator(config);
  }
  // As one of the processes of an MPI communicator, by its number of MPI_Comm_c2f.
  static Communicator mpi(std::int32_t comm,
                          double timeout = default_comm_config(GA_COMM_MPI).timeout) {
    ga_comm_config config = default_comm_config(GA_COMM_MPI);
    config.mpi_comm = comm;
    config.timeout = timeout;
    return Communicator(config);
  }

  ga_comm* get() const noexcept { return comm_; }
  std::int32_t rank() const {
    std::int32_t rank = 0;
    check(ga_comm_size(get(), &rank, nullptr));
    return rank;
  }
  std::int32_t ranks() const {
    std::int32_t ranks = 0;
    check(ga_comm_size(get(), nullptr, &ranks));
    return ranks;
  }
  // Legal while other threads are in calls that wait for other ranks.
  void abort() const { check(ga_comm_abort(get())); }

 private:
  static Communicator with_id(ga_comm_kind kind, const Id& id, std::int32_t rank,
                              std::int32_t ranks, double timeout) {
    if (id.size() != GA_COMM_ID_SIZE)
      throw std::invalid_argument("id has " + std::to_string(id.size()) +
                                  " bytes, expected GA_COMM_ID_SIZE");
    ga_comm_config config = default_comm_config(kind);
    config.id = id.data();
    config.rank = rank;
    config.ranks = ranks;
    config.timeout = timeout;
    return Communicator(config);
  }

  ga_comm* comm_ = nullptr;
};

// ---- Scopes -------------------------------------------------------------------------------------

// The destructors of the classes below call the library. If the call fails, they throw an Error,
// unless it is an exception that ends the scope. So their objects belong on the stack: containers
// and smart pointers let no exception out of their destructors. No object may outlive its context.

namespace detail {

// The context, until close(), and whether it is an exception that ends the scope.
class Scope {
 public:
  explicit Scope(ga_context* context) noexcept : context_(context) {}
  Scope(Scope&& other) noexcept
      : context_(std::exchange(other.context_, nullptr)), exceptions_(other.exceptions_) {}
  Scope& operator=(Scope&&) = delete;

  ga_context* get() const noexcept { return context_; }
  void close() noexcept { context_ = nullptr; }
  bool is_open() const noexcept { return context_ != nullptr; }
  bool is_unwinding() const noexcept { return std::uncaught_exceptions() > exceptions_; }

 private:
  ga_context* context_;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace detail

// The accumulator of a parameter, for a kernel of the program's own: see ga_accumulator. Made by
// MicroBatch::acquire. It is released at the end of its scope, unless an exception leaves the
// scope: the accumulator may be half written, and the micro-batch can then only be discarded.
class [[nodiscard]] Accumulator {
 public:
  Accumulator(Accumulator&&) noexcept = default;
  ~Accumulator() noexcept(false) {
    if (scope_.is_open() && !scope_.is_unwinding()) release();
  }

  const ga_accumulator& operator*() const noexcept { return accumulator_; }
  const ga_accumulator* operator->() const noexcept { return &accumulator_; }

  // Where to write, which may be null. GA_ERROR_INVALID_ARGUMENT: the dtype is not that of T.
  template <typename T>
  T* data() const {
    if (accumulator_.dtype != dtype_of<T>) {
      throw Error(GA_ERROR_INVALID_ARGUMENT, "the dtype of the accumulator was ga_dtype " +
                                                 std::to_string(accumulator_.dtype) +
                                                 ", not that of the pointer");
    }
    return static_cast<T*>(accumulator_.data);
  }

  void release() {
    check(ga_accumulator_release(scope_.get(), id(param_)));
    scope_.close();
  }

 private:
  friend class MicroBatch;
  Accumulator(ga_context* context, Param param)
      : scope_(context),
        param_(param),
        accumulator_(detail::defaults<ga_accumulator>(ga_accumulator_init)) {
    check(ga_accumulator_acquire(context, id(param), &accumulator_));
  }

  detail::Scope scope_;
  Param param_;
  ga_accumulator accumulator_;
};

// An open micro-batch, made by Context::micro_begin. Its destructor calls ga_micro_end, or
// ga_discard if an exception leaves the scope. If ga_micro_end fails there, the window is discarded
// too, and the destructor throws the Error.
//
// Objects that are declared after a MicroBatch are destroyed before it. Gradients that must live
// until ga_micro_end (under GA_NONFINITE_DROP_MICRO and GA_CLIP_WHEN_MICRO) are declared before it,
// or the program calls end().
class [[nodiscard]] MicroBatch {
 public:
  MicroBatch(MicroBatch&&) noexcept = default;
  ~MicroBatch() noexcept(false) {
    if (!scope_.is_open()) return;
    if (scope_.is_unwinding()) {
      ga_discard(scope_.get());
      return;
    }
    const ga_status status = ga_micro_end(scope_.get());
    if (status == GA_OK) return;
    const Error error(status, ga_last_error());
    ga_discard(scope_.get());
    throw error;
  }

  // With eager, several threads may do this at once: see ga_params_ready.
  void accumulate_part(Param param, const void* gradient) {
    check(ga_accumulate_part(scope_.get(), id(param), gradient));
  }

  template <typename Index>
  void accumulate_rows(Param param, const Index* indices, std::int64_t count, const void* values) {
    check(ga_accumulate_rows(scope_.get(), id(param), indices, dtype_of<Index>, count, values));
  }

  template <typename T>
  void accumulate_matmul(Param param, std::int64_t k, const T* a, std::int64_t lda,
                         ga_transpose transpose_a, const T* b, std::int64_t ldb,
                         ga_transpose transpose_b) {
    accumulate_matmul(param, k, a, lda, transpose_a, b, ldb, transpose_b, dtype_of<T>);
  }
  void accumulate_matmul(Param param, std::int64_t k, const void* a, std::int64_t lda,
                         ga_transpose transpose_a, const void* b, std::int64_t ldb,
                         ga_transpose transpose_b, ga_dtype dtype) {
    check(ga_accumulate_matmul(scope_.get(), id(param), k, a, lda, transpose_a, b, ldb, transpose_b,
                               dtype));
  }

  Accumulator acquire(Param param) { return Accumulator(scope_.get(), param); }

  void bn_backward_accumulate(BatchNorm bn, const void* x, const void* dy, std::int64_t samples,
                              std::int64_t positions) {
    check(ga_bn_backward_accumulate(scope_.get(), id(bn), x, dy, samples, positions));
  }
  void bn_backward(BatchNorm bn, const void* x, const void* dy, std::int64_t samples,
                   std::int64_t positions, void* dx) {
    check(ga_bn_backward(scope_.get(), id(bn), x, dy, samples, positions, dx));
  }

  // Three ways to close the micro-batch before the end of its scope: ga_micro_end, ga_micro_abort
  // and ga_discard. If one of them fails, the micro-batch is still open.
  void end() {
    check(ga_micro_end(scope_.get()));
    scope_.close();
  }
  void abort() {
    check(ga_micro_abort(scope_.get()));
    scope_.close();
  }
  void discard() {
    check(ga_discard(scope_.get()));
    scope_.close();
  }

 private:
  friend class Context;
  explicit MicroBatch(ga_context* context) noexcept : scope_(context) {}

  detail::Scope scope_;
};

// While it exists, parameters and moving averages are exchanged. Made by Context::ema_scope. If an
// exception leaves the scope, they are exchanged back too.
class [[nodiscard]] EmaScope {
 public:
  EmaScope(EmaScope&&) noexcept = default;
  ~EmaScope() noexcept(false) {
    if (!scope_.is_open()) return;
    const ga_status status = ga_ema_swap(scope_.get(), 0);
    if (!scope_.is_unwinding()) check(status);
  }

  // Exchanges them back before the end of the scope.
  void end() {
    check(ga_ema_swap(scope_.get(), 0));
    scope_.close();
  }

 private:
  friend class Context;
  explicit EmaScope(ga_context* context) : scope_(context) { check(ga_ema_swap(context, 1)); }

  detail::Scope scope_;
};

// ---- Context ------------------------------------------------------------------------------------

class Context {
 public:
  Context() : Context(Config()) {}
  explicit Context(const Config& config) : context_(nullptr, Destroy{config.callables_, true}) {
    ga_context* context = nullptr;
    check(ga_context_create(&config, &context));
    context_.reset(context);
  }

  // A context that the program has made with C: adopt() takes the ownership, borrow() does not, and
  // the program then destroys the context after this object.
  static Context adopt(ga_context* context) noexcept { return Context(context, true); }
  static Context borrow(ga_context* context) noexcept { return Context(context, false); }

  // Gives up the ownership; this object is then empty. GA_ERROR_INVALID_STATE: the context calls
  // callables of its Config, which belong to this object.
  ga_context* release() {
    const Config::Callables& callables = context_.get_deleter().callables;
    if (callables.parallel_for || callables.log || callables.on_param_done) {
      throw Error(GA_ERROR_INVALID_STATE,
                  "Context::release: the context calls a callable that belongs to this object");
    }
    return context_.release();
  }

  // For the C functions. Null after the context has been released or moved from.
  ga_context* get() const noexcept { return context_.get(); }

  void synchronize() { check(ga_synchronize(get())); }

  void set_stream(void* stream) { check(ga_context_set_stream(get(), stream)); }

  ga_memory memory() const {
    auto memory = detail::defaults<ga_memory>(ga_memory_init);
    check(ga_context_memory(get(), &memory));
    return memory;
  }

  void set_accum_steps(std::int64_t accum_steps) {
    check(ga_context_set_accum_steps(get(), accum_steps));
  }
  // From applied step from_steps[i] on, windows have accum_steps[i] micro-batches.
  void set_accum_schedule(const std::vector<std::int64_t>& from_steps,
                          const std::vector<std::int64_t>& accum_steps) {
    if (from_steps.size() != accum_steps.size()) {
      throw Error(GA_ERROR_INVALID_ARGUMENT, "from_steps and accum_steps differ in size");
    }
    check(ga_context_set_accum_schedule(get(), from_steps.data(), accum_steps.data(),
                                        from_steps.size()));
  }
  void set_steps(std::int64_t steps) { check(ga_context_set_steps(get(), steps)); }

  // -- Groups

  Group add_group(const ga_optimizer& optimizer) {
    ga_group group = -1;
    check(ga_group_add(get(), &optimizer, &group));
    return Group{group};
  }

  std::int32_t group_count() const {
    std::int32_t count = 0;
    check(ga_group_count(get(), &count));
    return count;
  }

  ga_optimizer optimizer(Group group) const {
    ga_optimizer optimizer{};
    optimizer.struct_size = sizeof optimizer;
    check(ga_group_optimizer(get(), id(group), &optimizer));
    return optimizer;
  }
  void set_optimizer(Group group, const ga_optimizer& optimizer) {
    check(ga_group_set_optimizer(get(), id(group), &optimizer));
  }

  // Of the next step.
  double lr(Group group) const {
    double lr = 0;
    check(ga_group_lr(get(), id(group), &lr));
    return lr;
  }
  double last_lr(Group group) const {
    double lr = 0;
    check(ga_group_last_lr(get(), id(group), &lr));
    return lr;
  }
  void set_lr(Group group, double lr) { check(ga_group_set_lr(get(), id(group), lr)); }
  void set_weight_decay(Group group, double weight_decay) {
    check(ga_group_set_weight_decay(get(), id(group), weight_decay));
  }
  void set_frozen(Group group, bool frozen) {
    check(ga_group_set_frozen(get(), id(group), frozen ? 1 : 0));
  }

  void set_schedule(Group group, const ga_schedule& schedule) {
    check(ga_group_set_schedule(get(), id(group), &schedule));
  }
  void clear_schedule(Group group) { check(ga_group_set_schedule(get(), id(group), nullptr)); }

  void set_clip(const ga_clip& clip) { check(ga_context_set_clip(get(), &clip)); }
  void clear_clip() { check(ga_context_set_clip(get(), nullptr)); }
  void set_clip(Group group, const ga_clip& clip) {
    check(ga_group_set_clip(get(), id(group), &clip));
  }
  void clear_clip(Group group) { check(ga_group_set_clip(get(), id(group), nullptr)); }
  ga_clip clip() const {
    auto clip = default_clip();
    check(ga_context_clip(get(), &clip));
    return clip;
  }
  // The group's own, or the context's.
  ga_clip clip(Group group) const {
    auto clip = default_clip();
    check(ga_group_clip(get(), id(group), &clip));
    return clip;
  }

  // -- Loss scale and EMA

  void set_loss_scaler(const ga_loss_scaler& scaler) {
    check(ga_context_set_loss_scaler(get(), &scaler));
  }
  void clear_loss_scaler() { check(ga_context_set_loss_scaler(get(), nullptr)); }
  double loss_scale() const {
    double scale = 0;
    check(ga_loss_scale(get(), &scale, nullptr));
    return scale;
  }
  // A number in the device's memory. GA_ERROR_INVALID_ARGUMENT: the context is on the CPU.
  const float* device_loss_scale() const {
    const void* scale = nullptr;
    check(ga_loss_scale(get(), nullptr, &scale));
    return static_cast<const float*>(scale);
  }

  void set_ema(const ga_ema& ema) { check(ga_context_set_ema(get(), &ema)); }
  void clear_ema() { check(ga_context_set_ema(get(), nullptr)); }

  void set_communicator(const Communicator& communicator,
                        const ga_comm_options& options = default_comm_options()) {
    check(ga_context_set_comm(get(), communicator.get(), &options));
  }
  void clear_communicator() { check(ga_context_set_comm(get(), nullptr, nullptr)); }
  template <typename T>
  void ema_copy_to(Param param, T* out) {
    ema_copy_to(param, out, dtype_of<T>);
  }
  void ema_copy_to(Param param, void* out, ga_dtype dtype) {
    check(ga_ema_copy_to(get(), id(param), out, dtype));
  }
  // ema_scope() swaps for a scope, ema_swap() until it is called again.
  EmaScope ema_scope() { return EmaScope(get()); }
  void ema_swap(bool on) { check(ga_ema_swap(get(), on ? 1 : 0)); }

  // -- Parameters

  template <typename T>
  Param add_param(Group group, const std::string& name, T* data,
                  const std::vector<std::int64_t>& shape,
                  const ga_param_options* options = nullptr) {
    return add_param(group, name, data, dtype_of<T>, shape, options);
  }
  Param add_param(Group group, const std::string& name, void* data, ga_dtype dtype,
                  const std::vector<std::int64_t>& shape,
                  const ga_param_options* options = nullptr) {
    ga_param param = -1;
    check(ga_param_add(get(), id(group), name.c_str(), data, dtype,
                       static_cast<std::int32_t>(shape.size()), shape.data(), options, &param));
    return Param{param};
  }

  // The id of entries[0]; the others follow.
  template <typename T>
  Param add_flat(T* data, const std::vector<ga_flat_entry>& entries,
                 const ga_param_options* options = nullptr) {
    return add_flat(data, dtype_of<T>, entries, options);
  }
  Param add_flat(void* data, ga_dtype dtype, const std::vector<ga_flat_entry>& entries,
                 const ga_param_options* options = nullptr) {
    ga_param first = -1;
    check(ga_params_add_flat(get(), data, dtype, entries.data(), entries.size(), options, &first));
    return Param{first};
  }

  void remove(Param param) { check(ga_param_remove(get(), id(param))); }

  std::int32_t param_count() const {
    std::int32_t count = 0;
    check(ga_param_count(get(), &count));
    return count;
  }
  Param find_param(const std::string& name) const {
    ga_param param = -1;
    check(ga_param_find(get(), name.c_str(), &param));
    return Param{param};
  }
  ga_param_info param_info(Param param) const {
    auto info = detail::defaults<ga_param_info>(ga_param_info_init);
    check(ga_param_describe(get(), id(param), &info));
    return info;
  }
  std::size_t slot_count() const {
    std::size_t count = 0;
    check(ga_slot_count(get(), &count));
    return count;
  }
  std::size_t slot(Param param) const {
    std::size_t slot = 0;
    check(ga_param_slot(get(), id(param), &slot));
    return slot;
  }

  void bind(Param param, void* data) { check(ga_param_bind(get(), id(param), data)); }
  void changed(Param param) { check(ga_param_changed(get(), id(param))); }
  void set_frozen(Param param, bool frozen) {
    check(ga_param_set_frozen(get(), id(param), frozen ? 1 : 0));
  }
  void set_lr_scale(Param param, double lr_scale) {
    check(ga_param_set_lr_scale(get(), id(param), lr_scale));
  }
  void set_weight_decay_scale(Param param, double weight_decay_scale) {
    check(ga_param_set_weight_decay_scale(get(), id(param), weight_decay_scale));
  }
  // Of a parameter that ranks have in parts: as many numbers as it has axes.
  void set_part(Param param, const std::vector<std::int64_t>& whole_shape,
                const std::vector<std::int64_t>& first, std::int32_t copies = 1) {
    const auto rank = static_cast<std::size_t>(param_info(param).rank);
    if (whole_shape.size() != rank || first.size() != rank) {
      throw Error(GA_ERROR_INVALID_ARGUMENT,
                  "the parameter has " + std::to_string(rank) + " axes, but whole_shape had " +
                      std::to_string(whole_shape.size()) + " numbers and first " +
                      std::to_string(first.size()));
    }
    check(ga_param_set_part(get(), id(param), whole_shape.data(), first.data(), copies));
  }

  // -- State

  void prepare() { check(ga_prepare(get())); }

  // The names, dtypes and sizes of a parameter's state.
  std::vector<ga_state_info> state(Param param) const {
    std::int32_t count = 0;
    check(ga_state_count(get(), id(param), &count));
    std::vector<ga_state_info> arrays;
    for (std::int32_t i = 0; i < count; ++i) {
      arrays.push_back(detail::defaults<ga_state_info>(ga_state_info_init));
      check(ga_state_describe(get(), id(param), i, &arrays.back()));
    }
    return arrays;
  }

  template <typename T>
  std::vector<T> state_get(Param param, const std::string& name) {
    std::int64_t count = 0;
    for (const ga_state_info& array : state(param)) {
      if (name == array.name) count = array.count;
    }
    // An empty vector has no address, and a name that is unknown is refused by the C function.
    std::vector<T> values(static_cast<std::size_t>(std::max<std::int64_t>(count, 1)));
    check(ga_state_get(get(), id(param), name.c_str(), values.data(), dtype_of<T>, count));
    values.resize(static_cast<std::size_t>(count));
    return values;
  }

  // values: a vector, an array, a span, ...
  template <typename Values>
  void state_set(Param param, const std::string& name, const Values& values) {
    using T = std::remove_pointer_t<decltype(std::data(values))>;
    check(ga_state_set(get(), id(param), name.c_str(), std::data(values), dtype_of<T>,
                       static_cast<std::int64_t>(std::size(values))));
  }
  void state_reset(Param param) { check(ga_state_reset(get(), id(param))); }

  // -- State on disk

  void save(const std::string& path, detail::StateOptions options = {}) {
    check(ga_save(get(), path.c_str(), options));
  }
  void load(const std::string& path, detail::StateOptions options = {}) {
    check(ga_load(get(), path.c_str(), options));
  }
  std::vector<char> save_to_memory(detail::StateOptions options = {}) {
    std::size_t size = 0;
    check(ga_save_to_memory(get(), options, nullptr, 0, &size));
    std::vector<char> bytes(size);
    check(ga_save_to_memory(get(), options, bytes.data(), bytes.size(), &size));
    return bytes;
  }
  // bytes: a vector, an array, a span, ... of objects of one byte.
  template <typename Bytes>
  void load_from_memory(const Bytes& bytes, detail::StateOptions options = {}) {
    static_assert(sizeof(*std::data(bytes)) == 1, "the elements of bytes are bytes");
    check(ga_load_from_memory(get(), std::data(bytes), std::size(bytes), options));
  }
  // write(std::int64_t offset, const void* data, std::size_t size) and read(std::int64_t offset,
  // void* data, std::size_t size) report failures by exceptions, which reach the caller.
  template <typename Write>
  void state_write(Write&& write, detail::StateOptions options = {}) {
    detail::Relay relay;
    auto call = [&](std::int64_t offset, const void* data, std::size_t size) {
      return relay.run([&] { write(offset, data, size); });
    };
    using Call = decltype(call);
    const ga_status status = ga_state_write(
        get(),
        [](void* user, std::int64_t offset, const void* data, std::size_t size) {
          return (*static_cast<Call*>(user))(offset, data, size);
        },
        &call, options);
    relay.rethrow();
    check(status);
  }
  template <typename Read>
  void state_read(Read&& read, std::int64_t size, detail::StateOptions options = {}) {
    detail::Relay relay;
    auto call = [&](std::int64_t offset, void* data, std::size_t bytes) {
      return relay.run([&] { read(offset, data, bytes); });
    };
    using Call = decltype(call);
    const ga_status status = ga_state_read(
        get(),
        [](void* user, std::int64_t offset, void* data, std::size_t bytes) {
          return (*static_cast<Call*>(user))(offset, data, bytes);
        },
        &call, size, options);
    relay.rethrow();
    check(status);
  }

  // -- Accumulate: a whole micro-batch

  // gradients: a vector, an array, a span, ... of pointers to a type that has a dtype, or to void.
  template <typename Gradients, typename = decltype(std::data(std::declval<const Gradients&>()))>
  void accumulate(const Gradients& gradients, double weight = 1,
                  const ga_micro_options* options = nullptr) {
    accumulate(std::data(gradients), std::size(gradients), weight, options);
  }
  void accumulate(std::initializer_list<const void*> gradients, double weight = 1,
                  const ga_micro_options* options = nullptr) {
    accumulate(gradients.begin(), gradients.size(), weight, options);
  }
  // An array of const void* or void* goes to the library as it is. One of float*, for instance, may
  // not be read as an array of const void*, so its pointers are first converted one by one, into an
  // array of this object that grows with the number of parameters and is used again.
  template <typename T>
  void accumulate(T* const* gradients, std::size_t count, double weight,
                  const ga_micro_options* options = nullptr) {
    if constexpr (std::is_void_v<T>) {
      check(ga_accumulate(get(), gradients, count, weight, options));
    } else {
      static_assert(dtype_of<T> != 0, "T is a type of numbers that has a DtypeOf");
      gradients_.assign(gradients, gradients + count);
      check(ga_accumulate(get(), gradients_.data(), count, weight, options));
    }
  }

  // -- Accumulate: by part

  // index: -1: the next one.
  MicroBatch micro_begin(std::int64_t index, double weight = 1,
                         const ga_micro_options* options = nullptr) {
    check(ga_micro_begin(get(), index, weight, options));
    return MicroBatch(get());
  }

  // params: a vector, an array, a span, ... of Param. A micro-batch may be open. With eager, several
  // threads may do this at once.
  template <typename Params, typename = decltype(std::data(std::declval<const Params&>()))>
  void params_ready(const Params& params) {
    params_ready(std::data(params), std::size(params));
  }
  void params_ready(std::initializer_list<Param> params) {
    params_ready(params.begin(), params.size());
  }
  // An array of Param may not be read as an array of ga_param, so the ids are first copied, into an
  // array of the thread that is used again.
  void params_ready(const Param* params, std::size_t count) {
    static thread_local std::vector<ga_param> ids;
    ids.clear();
    for (std::size_t k = 0; k < count; ++k) ids.push_back(id(params[k]));
    check(ga_params_ready(get(), ids.data(), count));
  }

  // since: the lowest number to look at.
  ga_kept_info gradients_kept(std::int64_t since = 0) const {
    auto info = detail::defaults<ga_kept_info>(ga_kept_info_init);
    check(ga_gradients_kept(get(), since, &info));
    return info;
  }

  // -- Step

  ga_window_info window() const {
    auto info = detail::defaults<ga_window_info>(ga_window_info_init);
    check(ga_window(get(), &info));
    return info;
  }

  ga_step_result step() {
    auto result = detail::defaults<ga_step_result>(ga_step_result_init);
    check(ga_step(get(), &result));
    return result;
  }
  // window: 0: the last one.
  ga_step_result step_result(std::int64_t window = 0, bool wait = true) {
    auto result = detail::defaults<ga_step_result>(ga_step_result_init);
    check(ga_step_result_get(get(), window, wait ? 1 : 0, &result));
    return result;
  }

  // MicroBatch::discard does this too. A MicroBatch that is left open would fail at its end.
  void discard() { check(ga_discard(get())); }

  // GA_ERROR_INVALID_ARGUMENT: the dtype of the gradient is not that of T.
  template <typename T>
  const T* gradient(Param param) {
    const void* data = nullptr;
    ga_dtype dtype = 0;
    check(ga_gradient(get(), id(param), &data, &dtype, nullptr));
    if (dtype != dtype_of<T>) {
      throw Error(GA_ERROR_INVALID_ARGUMENT, "the dtype of the gradient was ga_dtype " +
                                                 std::to_string(dtype) +
                                                 ", not that of the pointer");
    }
    return static_cast<const T*>(data);
  }

  // -- Batch normalisation. The backward calls for a micro-batch are in MicroBatch.

  BatchNorm add_batch_norm(const std::string& name, std::int64_t channels, Param gamma, Param beta,
                           const ga_bn_options& options = default_bn_options()) {
    ga_bn bn = -1;
    check(ga_bn_add(get(), name.c_str(), channels, id(gamma), id(beta), &options, &bn));
    return BatchNorm{bn};
  }
  std::int32_t batch_norm_count() const {
    std::int32_t count = 0;
    check(ga_bn_count(get(), &count));
    return count;
  }
  BatchNorm find_batch_norm(const std::string& name) const {
    ga_bn bn = -1;
    check(ga_bn_find(get(), name.c_str(), &bn));
    return BatchNorm{bn};
  }
  ga_bn_info batch_norm_info(BatchNorm bn) const {
    auto info = detail::defaults<ga_bn_info>(ga_bn_info_init);
    check(ga_bn_describe(get(), id(bn), &info));
    return info;
  }
  void set_frozen(BatchNorm bn, bool frozen) {
    check(ga_bn_set_frozen(get(), id(bn), frozen ? 1 : 0));
  }
  void bn_accumulate(BatchNorm bn, const void* x, std::int64_t samples, std::int64_t positions) {
    check(ga_bn_accumulate(get(), id(bn), x, samples, positions));
  }
  template <typename T>
  void bn_accumulate_stats(BatchNorm bn, std::int64_t count, const T* mean, const T* spread,
                           ga_bn_spread kind) {
    check(ga_bn_accumulate_stats(get(), id(bn), count, mean, spread, kind, dtype_of<T>));
  }
  void bn_finalize(BatchNorm bn) { check(ga_bn_finalize(get(), id(bn))); }
  void bn_backward_finalize(BatchNorm bn) { check(ga_bn_backward_finalize(get(), id(bn))); }
  void bn_forward(BatchNorm bn, const void* x, std::int64_t samples, std::int64_t positions,
                  void* y) {
    check(ga_bn_forward(get(), id(bn), x, samples, positions, y));
  }
  void bn_infer(BatchNorm bn, const void* x, std::int64_t samples, std::int64_t positions,
                void* y) {
    check(ga_bn_infer(get(), id(bn), x, samples, positions, y));
  }
  // Each array may be null. Returns how often the running statistics have moved.
  template <typename T>
  std::int64_t bn_running(BatchNorm bn, T* mean, T* variance) const {
    std::int64_t steps = 0;
    check(ga_bn_running(get(), id(bn), mean, variance, dtype_of<T>, &steps));
    return steps;
  }
  template <typename T>
  void bn_set_running(BatchNorm bn, const T* mean, const T* variance, std::int64_t steps) {
    check(ga_bn_running_set(get(), id(bn), mean, variance, dtype_of<T>, steps));
  }
  // Returns the number of elements of a channel.
  template <typename T>
  std::int64_t bn_statistics(BatchNorm bn, T* mean, T* variance) const {
    std::int64_t count = 0;
    check(ga_bn_statistics(get(), id(bn), mean, variance, dtype_of<T>, &count));
    return count;
  }

 private:
  // Keeps the callables until the context is destroyed, whose destruction may still call them.
  struct Destroy {
    Config::Callables callables;
    bool owns;
    void operator()(ga_context* context) const noexcept {
      if (owns) ga_context_destroy(context);
    }
  };
  Context(ga_context* context, bool owns) noexcept : context_(context, Destroy{{}, owns}) {}

  std::unique_ptr<ga_context, Destroy> context_;
  std::vector<const void*> gradients_;  // see accumulate()
};

}  // namespace gradaccum

#endif  // GRADACCUM_GRADACCUM_HPP_
