package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// ReadSysctl reads a sysctl as the calling thread's network namespace sees it.
// Names are written as for sysctl(8): with dots, or with slashes where a part
// holds a dot ("net/ipv4/conf/eth0.100/forwarding").
func ReadSysctl(name string) (string, error) {
	path, err := sysctlPath(name)
	if err != nil {
		return "", err
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", name, err)
	}
	return strings.TrimSpace(string(b)), nil
}

// WriteSysctl sets a sysctl in the calling thread's network namespace.
func WriteSysctl(name, value string) error {
	path, err := sysctlPath(name)
	if err != nil {
		return err
	}
	// No O_CREATE: a sysctl that does not exist is an error, not a file.
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("write sysctl %s: %w", name, err)
	}
	defer f.Close()
	if _, err := f.WriteString(value); err != nil {
		return fmt.Errorf("write sysctl %s=%s: %w", name, value, err)
	}
	return nil
}

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

// LocalPortRange reads net.ipv4.ip_local_port_range: the ports that the kernel chooses
// for sockets without a port.
func LocalPortRange() (PortRange, error) {
	const name = "net.ipv4.ip_local_port_range"
	s, err := ReadSysctl(name)
	if err != nil {
		return PortRange{}, err
	}
	fields := strings.Fields(s)
	if len(fields) != 2 {
		return PortRange{}, fmt.Errorf("parse sysctl %s=%q: want two ports", name, s)
	}
	r, err := parsePortRange(fields[0] + "-" + fields[1])
	if err != nil {
		return PortRange{}, fmt.Errorf("parse sysctl %s=%q: %w", name, s, err)
	}
	return r, nil
}

// LocalReservedPorts reads net.ipv4.ip_local_reserved_ports: ports that the kernel does
// not choose for sockets.
func LocalReservedPorts() ([]PortRange, error) {
	const name = "net.ipv4.ip_local_reserved_ports"
	s, err := ReadSysctl(name)
	if err != nil || s == "" {
		return nil, err
	}
	var ranges []PortRange
	for part := range strings.SplitSeq(s, ",") {
		r, err := parsePortRange(part)
		if err != nil {
			return nil, fmt.Errorf("parse sysctl %s=%q: %w", name, s, err)
		}
		ranges = append(ranges, r)
	}
	return ranges, nil
}

func parsePortRange(s string) (PortRange, error) {
	first, last, isRange := strings.Cut(strings.TrimSpace(s), "-")
	if !isRange {
		last = first
	}
	lo, err := strconv.ParseUint(first, 10, 16)
	if err != nil {
		return PortRange{}, err
	}
	hi, err := strconv.ParseUint(last, 10, 16)
	if err != nil {
		return PortRange{}, err
	}
	if hi < lo {
		return PortRange{}, fmt.Errorf("range %q ends before it starts", s)
	}
	return PortRange{uint16(lo), uint16(hi)}, nil
}

func sysctlPath(name string) (string, error) {
	rel := name
	// As in sysctl(8), the first separator decides.
	if i := strings.IndexAny(name, "./"); i >= 0 && name[i] == '.' {
		rel = strings.Map(func(r rune) rune {
			switch r {
			case '.':
				return '/'
			case '/':
				return '.'
			}
			return r
		}, name)
	}
	if !filepath.IsLocal(rel) {
		return "", fmt.Errorf("sysctl name %q: want a name such as net.ipv4.ip_forward", name)
	}
	return filepath.Join("/proc/sys", rel), nil
}
