// SPDX-License-Identifier: Apache-2.0
//
// Calls that create contexts, groups and parameters, and calls that set options.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "sequences/program.hpp"

namespace ga::test::sequences {

class SettingCalls : public Program {
 public:
  using Program::Program;

 protected:
  void set_up() {
    ga_config c = ga::test::config();
    if (chance(0.06)) c.num_threads = 2;
    c.nonfinite = policy_;
    c.accum_steps = pick<int64_t>({0, 0, 1, 2, 3, 4});
    c.gradient_kind = chance(0.3) ? GA_GRADIENT_SUM : GA_GRADIENT_MEAN;
    c.reduce = chance(0.3) ? GA_REDUCE_SUM : GA_REDUCE_MEAN;
    c.missing = chance(0.4) ? GA_MISSING_ZERO : GA_MISSING_SKIP;
    c.gradient_life =
        pick<ga_gradient_life>({GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE, GA_GRADIENTS_LENT});
    if (c.gradient_life == GA_GRADIENTS_LENT && c.nonfinite == GA_NONFINITE_DROP_MICRO)
      c.gradient_life = GA_GRADIENTS_LIVE;
    c.loss_scale = pick({1, 1, 1, 4, -2, 1024});
    // The mean of summed gradients divides by the total weight, and a tiny weight would overflow.
    if (c.gradient_kind == GA_GRADIENT_SUM && c.reduce == GA_REDUCE_MEAN) extreme_ = false;
    if (chance(0.05)) refused_config(c);
    World w;
    SAY("%d: ga_context_create({K %lld, gradients %d, reduce %d, missing %d, nonfinite %d, life "
        "%d, "
        "scale %g, threads %d})",
        static_cast<int>(worlds_.size()), static_cast<long long>(c.accum_steps), c.gradient_kind,
        c.reduce, c.missing, c.nonfinite, c.gradient_life, c.loss_scale, c.num_threads);
    if (!check("ga_context_create", 0, ga_context_create(&c, &w.ctx))) return;
    w.model = std::make_unique<Model>(c, contexts_);
    worlds_.push_back(std::move(w));
    World& made = worlds_.back();
    const int64_t groups = 1 + below(2), params = 1 + below(4);
    for (int64_t i = 0; i < groups; ++i) add_group(made);
    for (int64_t i = 0; i < params; ++i) add_params(made);
    if (chance(0.3)) set_scaler(made);
    if (chance(0.3)) set_ema(made);
    if (chance(0.3)) set_clip(made);
  }

  // Calls that are refused in every state.
  void refused(World& w) {
    ga_window_info info = {};
    info.struct_size = 8;
    double number_out;
    int64_t steps;
    const auto kind = below(12);
    SAY("%d: a wrong call, number %d", number_of(w), static_cast<int>(kind));
    const auto call = [&] {
      switch (kind) {
        case 0:
          return ga_window(w.ctx, &info);
        case 1:
          return ga_window(w.ctx, nullptr);
        case 2:
          return ga_step(nullptr, nullptr);
        case 3:
          return ga_accumulate(nullptr, nullptr, 0, 1, nullptr);
        case 4:
          return ga_micro_begin(nullptr, 0, 1, nullptr);
        case 5:
          return ga_discard(nullptr);
        case 6:
          return ga_loss_scale(w.ctx, nullptr, nullptr);
        case 7:
          return ga_group_lr(w.ctx, 99, &number_out);
        case 8:
          return ga_group_lr(w.ctx, 0, nullptr);
        case 9:
          return ga_gradient(w.ctx, 0, nullptr, nullptr, nullptr);
        case 10:
          return ga_bn_running(w.ctx, 99, nullptr, nullptr, GA_F64, &steps);
        default:
          return ga_step_result_get(w.ctx, 0, 2, nullptr);
      }
    };
    check("a wrong call", ga::model::kArgument, call());
  }

  void refused_config(ga_config c) {
    const auto kind = below(4);
    if (kind == 0) c.struct_size = 12;
    if (kind == 1) c.loss_scale = pick({0.0, NAN, INFINITY});
    if (kind == 2) c.accum_steps = -1;
    if (kind == 3) c.nonfinite = 4;
    ga_context* none = nullptr;
    SAY("ga_context_create(wrong)");
    check("ga_context_create", ga::model::kArgument, ga_context_create(&c, &none));
    ga_context_destroy(none);
  }

  void add_group(World& w) {
    ga_optimizer o = ga::test::optimizer(chance(0.2)   ? GA_OPTIMIZER_EXTERNAL
                                         : chance(0.5) ? GA_OPTIMIZER_ADAMW
                                                       : GA_OPTIMIZER_SGD);
    o.lr = pick({1, 0.5, 0.125, 0.01});
    if (o.kind == GA_OPTIMIZER_SGD) {
      o.momentum = pick({0, 0, 0.5, 0.9});
      o.weight_decay = pick({0, 0, 0.125});
      if (o.momentum > 0 && chance(0.3)) o.nesterov = 1;
      if (o.momentum > 0 && o.nesterov == 0 && chance(0.2)) o.dampening = 0.5;
    }
    if (chance(0.1)) o.maximize = 1;
    Statuses want = 0;
    ga_optimizer given = o;
    if (chance(0.05)) {
      given.lr = pick({-1.0, NAN});
      want = ga::model::kArgument;
    }
    if (want == 0) {
      want = w.model->add_group(o);
    } else if (!w.model->empty()) {
      want |= ga::model::kState;
    }
    SAY("%d: ga_group_add(kind %d, lr %g, momentum %g, decay %g)", number_of(w), given.kind,
        given.lr, given.momentum, given.weight_decay);
    check("ga_group_add", want, ga_group_add(w.ctx, &given, nullptr));
  }

  static bool is_external(const World& w, ga_group g) {
    const auto& groups = w.model->groups();
    return g >= 0 && static_cast<size_t>(g) < groups.size() &&
           groups[static_cast<size_t>(g)].optimizer.kind == GA_OPTIMIZER_EXTERNAL;
  }

  // Returns memory for a parameter: new memory, or that of a parameter of the other context.
  void* place(World& w, int32_t dtype, int64_t bytes) {
    if (worlds_.size() == 2 && chance(0.3)) {
      const auto& others = worlds_[&w == &worlds_[0] ? 1 : 0].model->params();
      if (!others.empty()) {
        const Param& p = others[static_cast<size_t>(below(static_cast<int64_t>(others.size())))];
        const int64_t offset = size_of(p.dtype) * below(2);
        if (!p.removed && p.data != nullptr && p.dtype == dtype) {
          char* const at = static_cast<char*>(p.data) + offset;
          if (at + bytes <= memory_.data() + next_) return at;
        }
      }
    }
    next_ = (next_ + 15) / 16 * 16 + 8 * static_cast<size_t>(below(2));
    if (next_ + static_cast<size_t>(bytes) + 64 > kMemory) return nullptr;
    void* const at = memory_.data() + next_;
    next_ += static_cast<size_t>(bytes);
    for (int64_t i = 0; i < bytes / size_of(dtype); ++i) store(at, dtype, i, number());
    shadow_ = memory_;
    return at;
  }

  void add_params(World& w) {
    if (w.model->params().size() >= 6) return;
    const int32_t dtype = pick<int32_t>({GA_F32, GA_F32, GA_F64, GA_BF16, GA_BF16});
    const size_t count = chance(0.2) ? 2 : 1;
    ga_param_options options = {};
    options.struct_size = sizeof options;
    int64_t shapes[2][2];
    std::string entry_names[2];
    ga_flat_entry entries[2];
    int64_t offset = 0;
    const bool rows = w.model->config().gradient_life != GA_GRADIENTS_LENT && chance(0.3);
    bool external = true;
    for (size_t i = 0; i < count; ++i) {
      const auto g = id<ga_group>(w.model->groups().size());
      external = external && is_external(w, g);
      shapes[i][0] = pick<int64_t>({1, 2, 3, 2, 4});
      shapes[i][1] = pick<int64_t>({1, 2, 3});
      const int32_t rank = rows || chance(0.3) ? 2 : 1;
      entry_names[i] = "p" + std::to_string(names_++);
      entries[i] = {sizeof *entries, entry_names[i].c_str(), g, rank, shapes[i], offset, nullptr};
      offset += shapes[i][0] * (rank == 2 ? shapes[i][1] : 1) + below(2);
    }
    if (rows) {
      bool lazy = dtype == GA_F32 || dtype == GA_F64;
      for (size_t i = 0; i < count; ++i) {
        const auto g = static_cast<size_t>(entries[i].group);
        if (g >= w.model->groups().size()) continue;
        const ga_optimizer& o = w.model->groups()[g].optimizer;
        lazy = lazy && o.kind == GA_OPTIMIZER_SGD && o.dampening == 0;
      }
      options.rows = lazy && chance(0.6) ? GA_ROWS_LAZY : GA_ROWS_DENSE;
    }
    if (chance(external && !rows ? 0.7 : 0.02)) options.reduce = GA_REDUCE_MAX;
    if (dtype == GA_BF16 && chance(0.25)) options.master = GA_MASTER_NONE;
    void* data = place(w, dtype, offset * size_of(dtype));
    if (!data) return;
    if (chance(0.06)) {
      if (chance(0.5) && !w.model->params().empty())
        data = w.model->params()[0].data;
      else
        data = static_cast<char*>(data) + 1;
    }
    Statuses want = w.model->add_params(data, dtype, entries, count, options);
    SAY("%d: ga_params_add_flat(%zu, first \"%s\" group %d dtype %d rows %d of %lld, rows option "
        "%d, master %d, reduce %d)",
        number_of(w), count, entries[0].name, entries[0].group, dtype, entries[0].rank,
        static_cast<long long>(shapes[0][0]), options.rows, options.master, options.reduce);
    const ga_status got =
        count == 1 && chance(0.5)
            ? ga_param_add(w.ctx, entries[0].group, entries[0].name, data, dtype, entries[0].rank,
                           shapes[0], &options, nullptr)
            : ga_params_add_flat(w.ctx, data, dtype, entries, count, &options, nullptr);
    check("ga_params_add_flat", want, got);
  }

  void set_scaler(World& w) {
    ga_loss_scaler s;
    ga_loss_scaler_init(&s, sizeof s);
    s.initial_scale = pick({1, 4, 1024, 65536});
    s.growth_interval = 1 + below(3);
    s.hysteresis = static_cast<int32_t>(1 + below(3));
    s.backoff_factor = pick({0.5, 0.25});
    s.growth_factor = pick({2, 4});
    if (chance(0.3)) s.min_scale = 1;
    if (chance(0.3)) s.max_scale = 65536 * 2;
    if (chance(0.06)) {
      if (chance(0.5))
        s.growth_factor = 1;
      else
        s.hysteresis = 0;
    }
    const bool none = chance(0.2);
    const Statuses want = w.model->set_loss_scaler(none ? nullptr : &s);
    SAY("%d: ga_context_set_loss_scaler(%s initial %g, interval %lld, hysteresis %d, *%g, *%g)",
        number_of(w), none ? "NULL" : "", s.initial_scale,
        static_cast<long long>(s.growth_interval), s.hysteresis, s.growth_factor, s.backoff_factor);
    check("ga_context_set_loss_scaler", want,
          ga_context_set_loss_scaler(w.ctx, none ? nullptr : &s));
  }

  void set_ema(World& w) {
    ga_ema e;
    ga_ema_init(&e, sizeof e);
    e.decay = chance(0.06) ? pick({-0.5, 1.5, NAN}) : pick({0.5, 0.75, 0.9, 0, 1});
    const bool none = chance(0.2);
    const Statuses want = w.model->set_ema(none ? nullptr : &e);
    SAY("%d: ga_context_set_ema(%s%g)", number_of(w), none ? "NULL " : "", e.decay);
    check("ga_context_set_ema", want, ga_context_set_ema(w.ctx, none ? nullptr : &e));
  }

  void set_clip(World& w) {
    ga_clip c = ga::test::clip(
        pick<int32_t>({GA_CLIP_NONE, GA_CLIP_GLOBAL, GA_CLIP_GLOBAL, GA_CLIP_PER_TENSOR}),
        pick({0.5, 1, 4, 0}), chance(0.5) ? GA_FLAVOR_TORCH : GA_FLAVOR_KERAS,
        chance(0.3) ? 0.75 : INFINITY);
    if (chance(0.06)) {
      if (chance(0.5))
        c.max_value = pick({0.0, NAN, -1.0});
      else
        c.scope = 4;
    }
    const bool none = chance(0.2), own = chance(0.3);
    const ga_clip* const given = none ? nullptr : &c;
    if (own) {
      const auto g = id<ga_group>(w.model->groups().size());
      const Statuses want = w.model->set_group_clip(g, given);
      SAY("%d: ga_group_set_clip(%d, %s scope %d, norm %g, value %g)", number_of(w), g,
          none ? "NULL" : "", c.scope, c.max_norm, c.max_value);
      check("ga_group_set_clip", want, ga_group_set_clip(w.ctx, g, given));
    } else {
      const Statuses want = w.model->set_clip(given);
      SAY("%d: ga_context_set_clip(%s scope %d, norm %g, value %g)", number_of(w),
          none ? "NULL" : "", c.scope, c.max_norm, c.max_value);
      check("ga_context_set_clip", want, ga_context_set_clip(w.ctx, given));
    }
  }

  void set_accum_steps(World& w) {
    if (chance(0.5)) {
      const int64_t k = chance(0.1) ? -1 : below(4);
      const Statuses want = w.model->set_accum_steps(k);
      SAY("%d: ga_context_set_accum_steps(%lld)", number_of(w), static_cast<long long>(k));
      check("ga_context_set_accum_steps", want, ga_context_set_accum_steps(w.ctx, k));
      return;
    }
    int64_t from[3] = {0, 1 + below(2), 4}, steps[3] = {below(4), below(4), below(4)};
    size_t count = static_cast<size_t>(below(4));
    if (chance(0.06)) from[0] = 1;
    if (chance(0.06)) steps[1] = -2;
    const int64_t* const given = count > 0 && chance(0.05) ? nullptr : steps;
    const Statuses want = w.model->set_accum_schedule(from, given, count);
    SAY("%d: ga_context_set_accum_schedule(%zu: %lld:%lld %lld:%lld %lld:%lld)", number_of(w),
        count, static_cast<long long>(from[0]), static_cast<long long>(steps[0]),
        static_cast<long long>(from[1]), static_cast<long long>(steps[1]),
        static_cast<long long>(from[2]), static_cast<long long>(steps[2]));
    check("ga_context_set_accum_schedule", want,
          ga_context_set_accum_schedule(w.ctx, from, given, count));
  }

  void set_rates(World& w) {
    const auto g = id<ga_group>(w.model->groups().size());
    const auto kind = below(4);
    if (kind == 0) {
      const double lr = chance(0.1) ? pick({-1.0, NAN, INFINITY}) : pick({1, 0.25, 0.01, 0});
      const Statuses want = w.model->set_lr(g, lr);
      SAY("%d: ga_group_set_lr(%d, %g)", number_of(w), g, lr);
      check("ga_group_set_lr", want, ga_group_set_lr(w.ctx, g, lr));
    } else if (kind == 1) {
      const double decay = chance(0.1) ? pick({-1.0, NAN, INFINITY}) : pick({0, 0.125, 0.01});
      const Statuses want = w.model->set_weight_decay(g, decay);
      SAY("%d: ga_group_set_weight_decay(%d, %g)", number_of(w), g, decay);
      check("ga_group_set_weight_decay", want, ga_group_set_weight_decay(w.ctx, g, decay));
    } else if (kind == 2) {
      ga_schedule s = ga::test::schedule(pick<int32_t>(
          {GA_SCHEDULE_CONSTANT, GA_SCHEDULE_LINEAR, GA_SCHEDULE_EXPONENTIAL, GA_SCHEDULE_BERT}));
      s.warmup_steps = below(3);
      s.total_steps = 3 + below(4);
      s.gamma = 0.5;
      const bool none = chance(0.3);
      const Statuses want = w.model->set_schedule(g, none ? nullptr : &s);
      SAY("%d: ga_group_set_schedule(%d, %s kind %d)", number_of(w), g, none ? "NULL" : "", s.kind);
      check("ga_group_set_schedule", want, ga_group_set_schedule(w.ctx, g, none ? nullptr : &s));
    } else {
      const bool right = g >= 0 && static_cast<size_t>(g) < w.model->groups().size();
      double lr = NAN;
      SAY("%d: ga_group_lr(%d)", number_of(w), g);
      if (check("ga_group_lr", right ? 0 : ga::model::kArgument, ga_group_lr(w.ctx, g, &lr)))
        same("ga_group_lr", lr, w.model->lr(g), 1e-12);
    }
  }

  void set_optimizer(World& w) {
    const auto g = id<ga_group>(w.model->groups().size());
    const bool known = g >= 0 && static_cast<size_t>(g) < w.model->groups().size();
    ga_optimizer o = known ? w.model->groups()[static_cast<size_t>(g)].optimizer
                           : ga::test::optimizer(GA_OPTIMIZER_SGD);
    o.lr = pick({1, 0.25, 0.01});
    o.weight_decay = pick({0, 0.125, 0.01});
    if (o.kind == GA_OPTIMIZER_ADAMW) {
      o.beta1 = pick({0.9, 0.85, 0.5});
      o.beta2 = pick({0.999, 0.9});
      if (chance(0.1)) o.kind = GA_OPTIMIZER_ADAM;
    } else if (o.kind == GA_OPTIMIZER_EXTERNAL) {
      if (chance(0.1)) o.kind = GA_OPTIMIZER_SGD;
    } else {
      if (o.momentum > 0) o.momentum = pick({0.9, 0.5, 0.25});
      if (chance(0.1)) o.momentum = o.momentum > 0 ? 0 : 0.5;
      o.nesterov = o.momentum > 0 && chance(0.3);
      o.dampening = o.momentum > 0 && !o.nesterov && chance(0.3) ? 0.5 : 0;
    }
    Statuses want = 0;
    if (chance(0.06)) {
      o.lr = pick({-1.0, NAN});
      want = ga::model::kArgument | ga::model::kUnsupported;
    } else {
      want = w.model->set_optimizer(g, o);
    }
    SAY("%d: ga_group_set_optimizer(%d, kind %d, lr %g, decay %g, momentum %g, dampening %g, beta1 "
        "%g)",
        number_of(w), g, o.kind, o.lr, o.weight_decay, o.momentum, o.dampening, o.beta1);
    check("ga_group_set_optimizer", want, ga_group_set_optimizer(w.ctx, g, &o));
  }

  // ---- Parameters -------------------------------------------------------------------------------

  void set_frozen(World& w) {
    const ga_param p = any_param(w);
    const int32_t frozen = chance(0.05) ? 2 : chance(0.4);
    const Statuses want = w.model->set_frozen(p, frozen);
    SAY("%d: ga_param_set_frozen(%d, %d)", number_of(w), p, frozen);
    check("ga_param_set_frozen", want, ga_param_set_frozen(w.ctx, p, frozen));
  }

  void set_scale(World& w) {
    const ga_param p = any_param(w);
    const double scale = chance(0.1) ? pick({-1.0, NAN, INFINITY}) : pick({0, 0.5, 0.1, 1, 2});
    if (chance(0.5)) {
      const Statuses want = w.model->set_scale(p, scale, &Param::lr_scale);
      SAY("%d: ga_param_set_lr_scale(%d, %g)", number_of(w), p, scale);
      check("ga_param_set_lr_scale", want, ga_param_set_lr_scale(w.ctx, p, scale));
    } else {
      const Statuses want = w.model->set_scale(p, scale, &Param::weight_decay_scale);
      SAY("%d: ga_param_set_weight_decay_scale(%d, %g)", number_of(w), p, scale);
      check("ga_param_set_weight_decay_scale", want,
            ga_param_set_weight_decay_scale(w.ctx, p, scale));
    }
  }

  void set_group_frozen(World& w) {
    const auto g = id<ga_group>(w.model->groups().size());
    const int32_t frozen = chance(0.05) ? 2 : chance(0.3);
    const Statuses want = w.model->set_group_frozen(g, frozen);
    SAY("%d: ga_group_set_frozen(%d, %d)", number_of(w), g, frozen);
    check("ga_group_set_frozen", want, ga_group_set_frozen(w.ctx, g, frozen));
  }

  void remove(World& w) {
    const ga_param p = any_param(w);
    const Statuses want = w.model->remove(p);
    SAY("%d: ga_param_remove(%d)", number_of(w), p);
    check("ga_param_remove", want, ga_param_remove(w.ctx, p));
  }

  // ---- State ------------------------------------------------------------------------------------

  void prepare(World& w) {
    const Statuses want = w.model->prepare();
    SAY("%d: ga_prepare()", number_of(w));
    check("ga_prepare", want, ga_prepare(w.ctx));
  }

  void state(World& w) {
    const ga_param p = any_param(w);
    if (chance(0.4)) {
      const Statuses want = w.model->reset_state(p);
      SAY("%d: ga_state_reset(%d)", number_of(w), p);
      check("ga_state_reset", want, ga_state_reset(w.ctx, p));
      return;
    }
    int64_t wanted = -1, got = -2;
    const Statuses want = w.model->get_step(p, wanted);
    SAY("%d: ga_state_get(%d, \"step\")", number_of(w), p);
    if (check("ga_state_get", want, ga_state_get(w.ctx, p, "step", &got, GA_I64, 1)))
      equal("step", got, wanted);
  }

  // There and back: the comparison after the call sees every byte of the parameters.
  void ema_swap(World& w) {
    const Statuses want = w.model->ema_swap();
    SAY("%d: ga_ema_swap(1), and back", number_of(w));
    if (!check("ga_ema_swap", want, ga_ema_swap(w.ctx, 1))) return;
    check("ga_step", ga::model::kState, ga_step(w.ctx, nullptr));
    check("ga_ema_swap", 0, ga_ema_swap(w.ctx, 0));
  }

  void changed(World& w) {
    const ga_param p = any_param(w);
    const Statuses want = w.model->changed(p);
    SAY("%d: ga_param_changed(%d)", number_of(w), p);
    check("ga_param_changed", want, ga_param_changed(w.ctx, p));
  }

  void bind(World& w) {
    const ga_param p = any_param(w);
    if (!is_param(w, p)) return;
    const Param& param = w.model->params()[static_cast<size_t>(p)];
    void* data = place(w, param.dtype, param.count * size_of(param.dtype));
    if (!data) return;
    if (chance(0.1)) data = chance(0.5) ? nullptr : static_cast<char*>(data) + 1;
    if (chance(0.05)) data = w.model->params()[0].data;
    const Statuses want = w.model->bind(p, data);
    SAY("%d: ga_param_bind(%d, %p)", number_of(w), p, data);
    check("ga_param_bind", want, ga_param_bind(w.ctx, p, data));
  }

  // The program writes a parameter itself, without a call.
  void write(World& w) {
    const ga_param p = any_param(w);
    if (!is_param(w, p)) return;
    const Param& param = w.model->params()[static_cast<size_t>(p)];
    if (param.count == 0) return;
    const int64_t i = below(param.count);
    const double x = pick({5, -3, 0.5, 7});
    store(param.data, param.dtype, i, x);
    shadow_ = memory_;
    SAY("%d: parameter %d [%lld] is set to %g", number_of(w), p, static_cast<long long>(i), x);
  }
};

}  // namespace ga::test::sequences
