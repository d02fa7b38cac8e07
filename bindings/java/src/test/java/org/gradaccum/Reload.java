// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.lang.ref.WeakReference;
import java.net.URL;
import java.net.URLClassLoader;
import java.nio.FloatBuffer;
import java.nio.file.Path;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * What UnloadTest runs in a JVM of its own: as a container that deploys a program again and again, loads the classes
 * by a class loader, trains on several threads, drops the loader, and waits until it is collected. Arguments: how
 * often, and where the classes are.
 */
public final class Reload {
  private static final int COUNT = 1 << 17;  // more than a thread takes alone

  private Reload() {}

  public static void main(String[] arguments) throws Exception {
    int rounds = Integer.parseInt(arguments[0]);
    URL[] urls = new URL[arguments.length - 1];
    for (int i = 0; i < urls.length; ++i) {
      urls[i] = Path.of(arguments[i + 1]).toUri().toURL();
    }
    for (int round = 0; round < rounds; ++round) {
      WeakReference<ClassLoader> loader = trainIn(urls);
      for (int i = 0; i < 1000 && loader.get() != null; ++i) {
        System.gc();
        Thread.sleep(5);
      }
      if (loader.get() != null) {
        System.out.println("round " + round + ": the class loader was not collected");
        System.exit(1);
      }
      Thread.sleep(20);
    }
    System.out.println(rounds + " class loaders were collected");
  }

  private static WeakReference<ClassLoader> trainIn(URL[] urls) throws Exception {
    URLClassLoader loader = new URLClassLoader(urls, ClassLoader.getPlatformClassLoader());
    loader.loadClass("org.gradaccum.Reload").getMethod("train").invoke(null);
    loader.close();
    return new WeakReference<>(loader);
  }

  /** Trains on several threads, and leaves a context to the collector whose thread still works. */
  public static void train() throws Exception {
    AtomicInteger good = new AtomicInteger();
    Thread[] threads = new Thread[3];
    for (int i = 0; i < threads.length; ++i) {
      threads[i] = new Thread(() -> good.addAndGet(trainOnce()));
      threads[i].start();
    }
    for (Thread thread : threads) {
      thread.join();
    }
    // Last, on a thread that stays, so that those of OpenMP that work for it stay too.
    good.addAndGet(trainOnce());
    if (good.get() != threads.length + 1) {
      throw new IllegalStateException("a parameter is wrong");
    }
    leave();
  }

  private static int trainOnce() {
    float[] gradient = new float[COUNT];
    gradient[COUNT - 1] = 2;
    FloatBuffer w = Buffers.floats(new float[COUNT]);
    try (Context context = new Context(Config.builder().numThreads(2).build())) {
      context.addParam(context.addGroup(Buffers.sgd(0.5)), "w", w, COUNT);
      context.accumulate(1, gradient);
      context.accumulate(1, gradient);
      context.step();
    }
    return w.get(COUNT - 1) == -1 && w.get(0) == 0 ? 1 : 0;
  }

  private static void leave() {
    AtomicInteger done = new AtomicInteger();
    Config config =
        Config.builder()
            .eager(true)
            .eagerThreads(1)
            .nonfinite(Config.Nonfinite.IGNORE)
            .onParamDone(param -> done.incrementAndGet())
            .build();
    Context context = new Context(config);
    Param param =
        context.addParam(
            context.addGroup(Buffers.sgd(1)), "w", Buffers.floats(new float[COUNT]), COUNT);
    MicroBatch micro = context.beginMicroBatch(-1, 1, MicroOptions.LAST);
    micro.accumulate(param, new float[COUNT]);
    context.ready(param);
  }
}
