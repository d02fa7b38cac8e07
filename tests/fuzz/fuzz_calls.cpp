// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes sequences of calls, which are compared with the model of tests/sequences. The first byte of an
// input is ga_config.nonfinite; the others make the choices that test_sequences.cpp makes at random.
#include <cstdio>
#include <cstdlib>

#include "sequences/sequence.hpp"

using ga::test::sequences::Chance;
using ga::test::sequences::Sequence;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  if (size == 0) return -1;
  const int32_t policy = bytes[0] % 4;
  const Chance choices(bytes + 1, size - 1);
  Sequence sequence(choices, policy, false);
  if (sequence.run()) return 0;
  Sequence again(choices, policy, true);
  again.run();
  std::fprintf(stderr, "%s\n%s", sequence.difference().c_str(), again.log().c_str());
  std::abort();
}
