package experiment

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Machine describes the machine of a measurement.
type Machine struct {
	Kernel string    `json:"kernel"`
	Arch   string    `json:"arch"`
	CPU    string    `json:"cpu"`
	Cores  int       `json:"cores"`
	Date   time.Time `json:"date"`
}

// String returns one line of text.
func (m Machine) String() string {
	cores := "cores"
	if m.Cores == 1 {
		cores = "core"
	}
	return fmt.Sprintf("Linux %s %s, %d %s of %s, %s",
		m.Kernel, m.Arch, m.Cores, cores, m.CPU, m.Date.Format("2006-01-02"))
}

// ReadMachine reads the kernel's description of this machine.
func ReadMachine() (Machine, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return Machine{}, fmt.Errorf("read kernel version: %w", err)
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return Machine{}, fmt.Errorf("read CPU model: %w", err)
	}
	return Machine{
		Kernel: unix.ByteSliceToString(u.Release[:]),
		Arch:   unix.ByteSliceToString(u.Machine[:]),
		CPU:    cpuModel(info),
		Cores:  runtime.NumCPU(),
		Date:   time.Now().UTC().Truncate(time.Second),
	}, nil
}

// cpuModel returns the name of the first CPU. arm64 kernels report numbers instead.
func cpuModel(cpuinfo []byte) string {
	lines := bufio.NewScanner(bytes.NewReader(cpuinfo))
	for lines.Scan() {
		name, value, ok := strings.Cut(lines.Text(), ":")
		if ok && strings.TrimSpace(name) == "model name" {
			return strings.Join(strings.Fields(value), " ")
		}
	}
	return "an unnamed CPU"
}

// ticksPerSecond is USER_HZ, the unit of /proc/stat: 100 on every Linux that
// Go runs on.
const ticksPerSecond = 100

// BusyCPU returns the busy time of all CPUs since boot, in seconds: everything except
// idle time and waiting for disks. It includes interrupts, which no process's own account
// has.
func BusyCPU() (float64, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, fmt.Errorf("read CPU time: %w", err)
	}
	return parseBusy(stat)
}

// stillBelow is the share of one CPU that an idle machine uses at most.
const stillBelow = 0.3

// Disturbed waits, for a second at most, until the CPUs are idle: the kernel needs a
// moment to remove the namespaces of a row. If they stay busy, it returns a note
// with the load.
func Disturbed(ctx context.Context) (note string) {
	const look = 100 * time.Millisecond
	share := 0.0
	for range 10 {
		before, err := BusyCPU()
		if err != nil {
			return ""
		}
		select {
		case <-ctx.Done():
			return ""
		case <-time.After(look):
		}
		after, err := BusyCPU()
		if err != nil {
			return ""
		}
		if share = (after - before) / look.Seconds(); share < stillBelow {
			return ""
		}
	}
	return fmt.Sprintf("The machine was not left alone: before this row began others used %.0f %% of a CPU.", 100*share)
}

// parseBusy parses the first line of /proc/stat: "cpu" user nice system idle iowait irq
// softirq steal guest guest_nice. user includes guest time, and stolen time belongs to
// other machines.
func parseBusy(stat []byte) (float64, error) {
	line, _, _ := strings.Cut(string(stat), "\n")
	fields := strings.Fields(line)
	if len(fields) < 8 || fields[0] != "cpu" {
		return 0, fmt.Errorf("read CPU time: /proc/stat begins with %q", line)
	}
	var ticks uint64
	for _, i := range []int{1, 2, 3, 6, 7} {
		n, err := strconv.ParseUint(fields[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read CPU time: /proc/stat: %w", err)
		}
		ticks += n
	}
	return float64(ticks) / ticksPerSecond, nil
}
