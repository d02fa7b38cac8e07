// SPDX-License-Identifier: Apache-2.0
// What tests ask about the build that they belong to. The answers are in an object that every test program links: those
// of the tests are the same in all builds of a compiler, with AddressSanitizer too, and ccache has them.
#pragma once

namespace ga::test {

bool has_onednn();    // the module for matrix products; sets GA_MODULE_PATH so that it is found
bool is_sanitized();  // with a sanitizer of addresses, threads or memory
bool refuses_undefined_behaviour();  // with that sanitizer

}  // namespace ga::test
