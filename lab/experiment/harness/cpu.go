package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"spillway.dev/spillway/test/testbed/topology"
)

// RanFor returns the CPU time of the cluster's processes and of kernel threads so far, in
// seconds. The kernel handles a packet in the context of its sender or, under load, of
// ksoftirqd; kernel workers delete expired entries. Other processes on the machine do not
// count, except for the work that they cause in kernel threads.
func (h *Harness) RanFor() (float64, error) {
	cluster, err := clusterCPU(h.Cluster)
	if err != nil {
		return 0, err
	}
	threads, err := kernelThreads()
	return cluster + threads, err
}

func clusterCPU(c *topology.Cluster) (float64, error) {
	text, err := os.ReadFile(filepath.Join(filepath.Dir(c.Node(0).CgroupRoot), "cpu.stat"))
	if err != nil {
		return 0, fmt.Errorf("read CPU time of the cluster: %w", err)
	}
	var us int64
	if _, err := fmt.Sscanf(string(text), "usage_usec %d", &us); err != nil {
		return 0, fmt.Errorf("read CPU time of the cluster: %w", err)
	}
	return float64(us) / 1e6, nil
}

// kernelThread is the flag of /proc/PID/stat (PF_KTHREAD).
const kernelThread = 0x0020_0000

// kernelThreads returns the run time of the kernel's threads, in seconds.
func kernelThreads() (float64, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, err
	}
	var ns int64
	for _, dir := range dirs {
		stat, err := os.ReadFile(dir + "/stat")
		if err != nil || !isKernelThread(string(stat)) {
			continue // or ended
		}
		if text, err := os.ReadFile(dir + "/schedstat"); err == nil {
			var ran int64
			if _, err := fmt.Sscan(string(text), &ran); err != nil {
				return 0, fmt.Errorf("read CPU time of %s: %w", dir, err)
			}
			ns += ran
		}
	}
	return float64(ns) / 1e9, nil
}

// isKernelThread reads /proc/PID/stat: "PID (NAME) STATE PPID PGRP SESSION TTY TPGID FLAGS ...".
func isKernelThread(stat string) bool {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < 7 {
		return false
	}
	flags, err := strconv.ParseUint(fields[6], 10, 64)
	return err == nil && flags&kernelThread != 0
}
