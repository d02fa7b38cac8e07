/* A native library of another version, as far as the facade asks before it goes on.
 * SPDX-License-Identifier: Apache-2.0 */
int CSharp_GradAccum_ga_version(void);

int CSharp_GradAccum_ga_version(void) { return 90909; }
