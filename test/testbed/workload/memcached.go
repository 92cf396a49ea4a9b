package workload

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
)

// ServeMemcached runs memcached with one thread, on TCP only.
func ServeMemcached(ctx context.Context, c Config) error {
	path, err := exec.LookPath("memcached")
	if err != nil {
		return fmt.Errorf("run memcached: %w: install the package memcached", err)
	}
	endpoints, err := listenAddrs(c.Listen)
	if err != nil {
		return err
	}
	if err := checkFree(ctx, c.Listen); err != nil {
		return err
	}
	var listen []string
	for _, e := range endpoints {
		listen = append(listen, e.addr.String())
	}
	cmd := exec.Command(path, "-u", "root", "-t", "1", "-m", "64", "-c", "4096", "-b", "16384", "-l", strings.Join(listen, ","))
	return runProgram(ctx, c, "memcached", cmd, endpoints)
}
