// Package privilege measures what the agent needs from the kernel and tests that
// the chart grants that much and no more: capabilities and system calls.
//
// The agent runs below a wrapper that drops every other capability from all sets,
// sets no_new_privs and loads a seccomp profile, as a container runtime does. The
// file system of a container is the business of test/controlplane.
package privilege
