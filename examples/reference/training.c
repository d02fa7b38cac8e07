/* What a recipe sets: schedule, clipping, loss scale, EMA.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "example.h"

enum { N = 2 };

static float w[N] = {1, 1}, dw[N];

/* Gradients of a loss that was multiplied by scale. */
static void backward(double scale) {
  for (int i = 0; i < N; ++i) dw[i] = (float)(scale * 30 * (i + 1));
}

static double evaluate(const float* parameters) { return parameters[0]; }

int main(void) {
  ga_context* ctx = context_of(NULL, w, N);
  const ga_group group = 0;

  /* example: ga_group_set_schedule */
  ga_schedule cosine;
  ga_schedule_init(&cosine, sizeof cosine, GA_SCHEDULE_COSINE);
  cosine.warmup_steps = 2;    /* lr / 2, then lr; the units are applied steps */
  cosine.total_steps = 10000; /* warm-up included */
  cosine.end_factor = 0.1;
  ga_group_set_schedule(ctx, group, &cosine);
  /* end */

  /* example: ga_context_set_clip */
  ga_clip clip;
  ga_clip_init(&clip, sizeof clip);
  clip.scope = GA_CLIP_GLOBAL;
  clip.max_norm = 1;
  ga_context_set_clip(ctx, &clip);
  /* end */

  /* example: ga_group_set_clip */
  ga_clip agc; /* this group alone: adaptive gradient clipping, by unit */
  ga_clip_init(&agc, sizeof agc);
  agc.scope = GA_CLIP_AGC;
  agc.agc_factor = 0.02;
  agc.agc_units = GA_AGC_TORCH; /* weights are [out, in] */
  ga_group_set_clip(ctx, group, &agc);
  ga_group_set_clip(ctx, group, NULL); /* the context's clip again */
  /* end */

  /* example: ga_context_set_loss_scaler */
  ga_loss_scaler scaler;
  ga_loss_scaler_init(&scaler, sizeof scaler);
  scaler.initial_scale = 1024;
  ga_context_set_loss_scaler(ctx, &scaler);
  /* end */

  /* example: ga_context_set_ema */
  ga_ema ema;
  ga_ema_init(&ema, sizeof ema);
  ema.decay = 0.5;
  ga_context_set_ema(ctx, &ema);
  /* end */

  for (int step = 0; step < 2; ++step) {
    /* example: ga_loss_scale */
    double scale;
    ga_loss_scale(ctx, &scale, NULL); /* the same for all micro-batches of a window */
    backward(scale);                  /* of loss * scale; the library divides by it */
    ga_accumulate(ctx, (const void*[]){dw}, 1, 32, NULL);
    /* end */
    ga_step(ctx, NULL);
  }

  /* The clipped gradient is (1, 2) / sqrt(5), the learning rates are 0.05 and 0.1. */
  const double slope = 0.4472136, first = 1 - 0.05 * slope, second = first - 0.1 * slope;
  double lr;
  /* example: ga_group_lr */
  ga_group_lr(ctx, group, &lr);          /* of the next step */
  ga_group_set_lr(ctx, group, 0.5 * lr); /* with a schedule: its peak */
  /* end */
  int right = near(w[0], second) && near(lr, 0.1);

  /* example: ga_ema_swap */
  ga_ema_swap(ctx, 1);
  const double score = evaluate(w); /* w holds the average now */
  ga_ema_swap(ctx, 0);              /* and the parameters again, to the last bit */
  /* end */
  right = right && near(score, (first + second) / 2) && near(w[0], second);

  float average[N];
  /* example: ga_ema_copy_to */
  ga_ema_copy_to(ctx, 0, average, GA_F32); /* of parameter 0 */
  /* end */
  right = right && near(average[0], score);

  ga_context_destroy(ctx);
  return result(right);
}
