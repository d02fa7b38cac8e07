// SPDX-License-Identifier: Apache-2.0
//
// Calls that hand gradients to the library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "sequences/setting_calls.hpp"

namespace ga::test::sequences {

class GradientCalls : public SettingCalls {
 public:
  using SettingCalls::SettingCalls;

 protected:
  // Returns the address of a gradient, sometimes one that the library must refuse.
  const void* gradient(World& w, const Param& p) {
    void* const data = numbers(p.dtype, p.count);
    if (!chance(0.05)) return data;
    const auto kind = below(4);
    if (kind == 0) return static_cast<char*>(data) + 1;
    if (kind == 1) return w.model->params()[0].data;
    return near_live_gradient(w, p, data);
  }

  // Returns an address that overlaps the parameter's live gradient, or otherwise if it has none.
  const void* near_live_gradient(World& w, const Param& p, const void* otherwise) {
    if (p.live_gradient.empty() || w.model->config().nonfinite == GA_NONFINITE_DROP_MICRO)
      return otherwise;
    const auto at = reinterpret_cast<const char*>(p.live_gradient.begin);
    return at + size_of(p.dtype) * (chance(0.4) ? 0 : below(2 * p.count - 1) - (p.count - 1));
  }

  // After a call that succeeded: the library may read these later. back: how many gradients came after this one.
  static void bring(World& w, const Range& given, size_t back = 0) {
    w.kept.push_back({kept_info(w, 0).latest - static_cast<int64_t>(back), given});
  }

  void accumulate(World& w) {
    const auto& blocks = w.model->blocks();
    std::vector<const void*> gradients;
    std::vector<Range> given;
    std::string described;
    for (const auto& block : blocks) {
      if (chance(0.2)) {
        gradients.push_back(nullptr);
        given.push_back({});
        described += " NULL";
        continue;
      }
      if (block.size() == 1) {
        const Param& p = w.model->params()[static_cast<size_t>(block[0])];
        gradients.push_back(gradient(w, p));
        given.push_back({gradients.back(), p.count * size_of(p.dtype)});
        if (verbose_) described += describe(gradients.back(), p.dtype, p.count);
      } else {
        const Param& last = w.model->params()[static_cast<size_t>(block.back())];
        gradients.push_back(numbers(last.dtype, last.offset + last.count));
        given.push_back({gradients.back(), (last.offset + last.count) * size_of(last.dtype)});
        if (verbose_) described += describe(gradients.back(), last.dtype, last.offset + last.count);
      }
    }
    size_t count = gradients.size();
    if (chance(0.02)) ++count;
    const void* const* list = chance(0.01) ? nullptr : gradients.data();
    const double by = weight();
    if (!list && !(by > 0)) list = gradients.data();
    gradients.resize(gradients.size() + 1);
    if (list) list = gradients.data();
    const ga_micro_options o = micro_options();
    const Statuses want = w.model->accumulate(list, count, by, o);
    SAY("%d: ga_accumulate(%zu:%s, weight %g, scale %g, flags %u)", number_of(w), count,
        described.c_str(), by, o.loss_scale, o.flags);
    if (!check("ga_accumulate", want, ga_accumulate(w.ctx, list, count, by, &o))) return;
    for (size_t i = 0; i < given.size(); ++i) bring(w, given[i], given.size() - 1 - i);
  }

  std::string describe(const void* data, int32_t dtype, int64_t count) const {
    const auto at = reinterpret_cast<uintptr_t>(data);
    std::string list =
        " @" + std::to_string(at - reinterpret_cast<uintptr_t>(scratch_.data())) + "{";
    if (at >= reinterpret_cast<uintptr_t>(scratch_.data()) &&
        at < reinterpret_cast<uintptr_t>(scratch_.data() + kScratch - 1000))
      for (int64_t i = 0; i < count; ++i) list += (i ? " " : "") + text("%g", load(data, dtype, i));
    return list + "}";
  }

  void begin(World& w) {
    int64_t index = w.model->size();
    double by = weight();
    ga_micro_options o = micro_options();
    if (index > 0 && chance(0.35)) {
      index = below(index);
      const ga::model::Micro& m = w.model->micro(index);
      by = m.weight;
      o.loss_scale = m.loss_scale == w.model->loss_scale() ? 0 : m.loss_scale;
      if (chance(0.04)) by += 1;
    } else if (chance(0.05)) {
      index += pick<int64_t>({1, -index - 2, 100});
    } else if (chance(0.1)) {
      index = -1;
    }
    const Statuses want = w.model->micro_begin(index, by, o);
    SAY("%d: ga_micro_begin(%lld, weight %g, scale %g, flags %u)", number_of(w),
        static_cast<long long>(index), by, o.loss_scale, o.flags);
    check("ga_micro_begin", want, ga_micro_begin(w.ctx, index, by, &o));
  }

  void part(World& w) {
    const ga_param p = any_param(w);
    const void* g = nullptr;
    Range given;
    std::string described;
    if (is_param(w, p)) {
      const Param& param = w.model->params()[static_cast<size_t>(p)];
      if (!chance(0.03)) {
        g = gradient(w, param);
        given = {g, param.count * size_of(param.dtype)};
        if (verbose_) described = describe(g, param.dtype, param.count);
      }
    }
    const Statuses want = w.model->accumulate_part(p, g);
    SAY("%d: ga_accumulate_part(%d,%s)", number_of(w), p, described.c_str());
    if (check("ga_accumulate_part", want, ga_accumulate_part(w.ctx, p, g))) bring(w, given);
  }

  void rows(World& w) {
    const ga_param p = any_param(w);
    if (!is_param(w, p)) return;
    const Param& param = w.model->params()[static_cast<size_t>(p)];
    if (param.rows_option == GA_ROWS_NONE && chance(0.9)) return;
    int32_t index_dtype = chance(0.5) ? GA_I32 : GA_I64;
    int64_t count = below(4);
    void* indices = take(4 * 8);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = below(param.rows);
      if (index_dtype == GA_I32)
        static_cast<int32_t*>(indices)[i] = static_cast<int32_t>(row);
      else
        static_cast<int64_t*>(indices)[i] = row;
    }
    const void* values = numbers(param.dtype, count * param.columns);
    const bool read =
        w.model->open() >= 0 && !param.frozen && w.model->micro(w.model->open()).weight > 0;
    if (read && count > 0 && chance(0.12)) {
      const auto kind = below(5);
      if (kind == 0) values = static_cast<const char*>(values) + 1;
      if (kind == 1) values = near_live_gradient(w, param, values);
      if (kind == 2) indices = static_cast<char*>(indices) + 2;
      if (kind == 3) {
        const int64_t row = pick<int64_t>({-1, param.rows}), at = below(count);
        if (index_dtype == GA_I32)
          static_cast<int32_t*>(indices)[at] = static_cast<int32_t>(row);
        else
          static_cast<int64_t*>(indices)[at] = row;
      }
      if (kind == 4) values = param.data;
    }
    if (chance(0.02)) index_dtype = GA_F32;
    if (chance(0.02)) count = -1;
    if (read && count > 0 && chance(0.02)) values = nullptr;
    std::string described;
    if (verbose_ && values && count > 0 && index_dtype != GA_F32) {
      for (int64_t i = 0; i < count; ++i)
        described += " " + std::to_string(ga::model::load_index(indices, index_dtype, i));
      described += describe(values, param.dtype, count * param.columns);
    }
    const Statuses want = w.model->accumulate_rows(p, indices, index_dtype, count, values);
    SAY("%d: ga_accumulate_rows(%d, %lld:%s)", number_of(w), p, static_cast<long long>(count),
        described.c_str());
    if (check("ga_accumulate_rows", want,
              ga_accumulate_rows(w.ctx, p, indices, index_dtype, count, values))) {
      bring(w, {values, count * param.columns * size_of(param.dtype)});
      bring(w, {indices, 4 * 8});
    }
  }

  void acquire(World& w) {
    const ga_param p = any_param(w);
    auto out = to_fill<ga_accumulator>();
    ga_accumulator wanted = {};
    bool handed = false;
    if (chance(0.05)) {
      out.struct_size = 8;
      SAY("%d: ga_accumulator_acquire(%d) with a wrong size", number_of(w), p);
      const ga_status got = ga_accumulator_acquire(w.ctx, p, &out);
      Statuses also = w.model->open() < 0 ? ga::model::kState : 0;
      if (is_param(w, p)) {
        const Param& param = w.model->params()[static_cast<size_t>(p)];
        if (param.acquired || param.ready) also |= ga::model::kState;
        if (param.maximum) also |= ga::model::kUnsupported;
      }
      if (policy_ == GA_NONFINITE_DROP_MICRO) also |= ga::model::kUnsupported;
      check("ga_accumulator_acquire", ga::model::kArgument | also, got);
      return;
    }
    const Statuses want = w.model->acquire(p, &wanted, &handed);
    SAY("%d: ga_accumulator_acquire(%d)", number_of(w), p);
    if (!check("ga_accumulator_acquire", want, ga_accumulator_acquire(w.ctx, p, &out))) return;
    if ((out.data != nullptr) != handed) return differ("ga_accumulator.data is NULL or is not");
    w.held.push_back({p, out});
    if (!handed) return;
    equal("ga_accumulator.dtype", out.dtype, wanted.dtype);
    equal("ga_accumulator.rows", out.rows, wanted.rows);
    equal("ga_accumulator.columns", out.columns, wanted.columns);
    same("ga_accumulator.alpha", out.alpha, wanted.alpha, std::abs(wanted.alpha) * 1e-14);
    same("ga_accumulator.beta", out.beta, wanted.beta);
  }

  void release(World& w) {
    ga_param p = any_param(w);
    std::vector<double> g;
    const size_t n = w.held.size();
    size_t at = n;
    if (n > 0 && chance(0.9)) {
      at = static_cast<size_t>(below(static_cast<int64_t>(n)));
      p = w.held[at].param;
    }
    for (size_t i = 0; i < n; ++i)
      if (w.held[i].param == p) at = i;
    if (at < n && w.held[at].at.data) {
      const ga_accumulator& a = w.held[at].at;
      for (int64_t r = 0; r < a.rows; ++r) {
        for (int64_t c = 0; c < a.columns; ++c) {
          g.push_back(chance(nonfinite_rate_ / 4) ? NAN : number());
          const int64_t i = r * a.leading_dimension + c;
          const double old = a.beta == 0 ? 0 : a.beta * load(a.data, a.dtype, i);
          store(a.data, a.dtype, i, a.alpha * g.back() + old);
        }
      }
    }
    const Statuses want = w.model->release(p, g);
    SAY("%d: ga_accumulator_release(%d) of %zu numbers", number_of(w), p, g.size());
    if (check("ga_accumulator_release", want, ga_accumulator_release(w.ctx, p)) && at < n)
      w.held.erase(w.held.begin() + static_cast<std::ptrdiff_t>(at));
  }

  void ready(World& w) {
    ga_param list[3];
    const auto count = static_cast<size_t>(1 + below(2)) - (chance(0.05) ? 1 : 0);
    std::string described;
    for (size_t k = 0; k < count; ++k) {
      list[k] = any_param(w);
      if (verbose_) described += " " + std::to_string(list[k]);
    }
    const ga_param* const given = chance(0.03) ? nullptr : list;
    const Statuses want = w.model->params_ready(given, count);
    SAY("%d: ga_params_ready(%zu:%s)", number_of(w), count, given ? described.c_str() : " NULL");
    check("ga_params_ready", want, ga_params_ready(w.ctx, given, count));
  }

  void end(World& w) {
    const Statuses want = w.model->micro_end();
    SAY("%d: ga_micro_end()", number_of(w));
    check("ga_micro_end", want, ga_micro_end(w.ctx));
  }

  void abort(World& w) {
    const Statuses want = w.model->micro_abort();
    SAY("%d: ga_micro_abort()", number_of(w));
    if (check("ga_micro_abort", want, ga_micro_abort(w.ctx))) w.held.clear();
  }

  void discard(World& w) {
    w.model->discard();
    w.held.clear();
    SAY("%d: ga_discard()", number_of(w));
    check("ga_discard", 0, ga_discard(w.ctx));
  }
};

}  // namespace ga::test::sequences
