package kernel

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Listener is a TCP socket that listens, or a UDP socket that is bound and not connected.
type Listener struct {
	Protocol uint8          // unix.IPPROTO_TCP or IPPROTO_UDP
	Addr     netip.AddrPort // an unspecified IPv6 address may stand for IPv4, too
	Inode    string         // of the socket, as in /proc/PID/fd
}

// The states of sockets in /proc/net (include/net/tcp_states.h).
const (
	procListen = "0A" // TCP_LISTEN
	procClosed = "07" // TCP_CLOSE: an unconnected UDP socket
)

// Listeners lists the listeners of the calling thread's network namespace.
func Listeners() (list []Listener, err error) {
	for _, file := range []string{"tcp", "tcp6", "udp", "udp6"} {
		protocol, state := uint8(unix.IPPROTO_TCP), procListen
		if strings.HasPrefix(file, "udp") {
			protocol, state = unix.IPPROTO_UDP, procClosed
		}
		f, err := os.Open("/proc/thread-self/net/" + file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // no IPv6
		}
		if err != nil {
			return nil, fmt.Errorf("list listening sockets: %w", err)
		}
		lines := bufio.NewScanner(f)
		lines.Scan() // the heading
		for lines.Scan() {
			// sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
			words := strings.Fields(lines.Text())
			if len(words) < 10 {
				continue
			}
			if words[3] != state {
				if protocol == unix.IPPROTO_TCP {
					break // connections follow the listeners
				}
				continue
			}
			if addr, ok := ProcAddr(words[1]); ok {
				list = append(list, Listener{protocol, addr, words[9]})
			}
		}
		f.Close()
		if err := lines.Err(); err != nil {
			return nil, fmt.Errorf("list listening sockets: %w", err)
		}
	}
	return list, nil
}

// ProcAddr reads an address as /proc/net/tcp has it: words of the machine's byte order.
func ProcAddr(text string) (netip.AddrPort, bool) {
	var port uint16
	words, number, _ := strings.Cut(text, ":")
	b, err := hex.DecodeString(words)
	if _, scan := fmt.Sscanf(number, "%04X", &port); err != nil || scan != nil || len(b)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(b); i += 4 {
		slices.Reverse(b[i : i+4])
	}
	addr, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(addr, port), ok
}
