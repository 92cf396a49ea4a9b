package workload

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"spillway.dev/spillway/test/testbed/topology"
)

// nginxConf configures a minimal server. /client returns the client's address; every
// other path returns the body, from the page cache.
const nginxConf = `
daemon off;
master_process on;
worker_processes 1;
worker_rlimit_nofile 65536;
user root;
pid %[1]s/nginx.pid;
error_log stderr error;
events { worker_connections 32768; multi_accept on; }
http {
	access_log off;
	default_type text/plain;
	keepalive_requests 1000000000;
	keepalive_timeout 1h;
	tcp_nodelay on;
	sendfile on;
	open_file_cache max=10 inactive=1h;
	open_file_cache_valid 1h;
	client_body_temp_path %[1]s/tmp;
	proxy_temp_path %[1]s/tmp;
	fastcgi_temp_path %[1]s/tmp;
	uwsgi_temp_path %[1]s/tmp;
	scgi_temp_path %[1]s/tmp;
	server {
%[2]s		root %[1]s/www;
		location = /client { return 200 "%[3]s $remote_addr\n"; }
		location / { try_files /body =404; }
	}
}
`

// ServeHTTP runs nginx with one worker. It answers every path with the server's name in a
// line, padded to Size, and /client with "NAME ADDRESS\n".
func ServeHTTP(ctx context.Context, c Config) error {
	path, err := exec.LookPath("nginx")
	if err != nil {
		return fmt.Errorf("run nginx: %w: install the package nginx-light", err)
	}
	endpoints, err := listenAddrs(c.Listen)
	if err != nil {
		return err
	}
	// nginx would retry for seconds, and the owner of the port would answer instead.
	if err := checkFree(ctx, c.Listen); err != nil {
		return err
	}
	dir, err := nginxDir(c, endpoints)
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	return runNginx(ctx, c, path, dir, endpoints)
}

// runNginx runs nginx until it or the context ends.
func runNginx(ctx context.Context, c Config, path, dir string, endpoints []endpoint) error {
	return runProgram(ctx, c, "nginx", exec.Command(path, "-p", dir, "-c", dir+"/nginx.conf", "-e", "stderr"), endpoints)
}

// runProgram runs a server until it or the context ends.
func runProgram(ctx context.Context, c Config, name string, cmd *exec.Cmd, endpoints []endpoint) error {
	var messages strings.Builder
	cmd.Stderr = &messages
	// It must not outlive this process, whatever ends it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run %s: %w", name, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	up := make(chan struct{})
	go func() {
		if waitForPort(ctx, endpoints) {
			close(up)
		}
	}()
	for {
		select {
		case <-up:
			up = nil
			c.ready()
		case <-ctx.Done():
			_ = cmd.Process.Signal(syscall.SIGTERM)
			<-ended
			return nil
		case err := <-ended:
			line, _, _ := strings.Cut(messages.String(), "\n")
			return fmt.Errorf("run %s: %w: %s", name, errors.Join(err, errors.New("it ended")), line)
		}
	}
}

// nginxDir writes nginx's files into a new directory.
func nginxDir(c Config, endpoints []endpoint) (string, error) {
	parent := c.Dir
	if parent == "" {
		parent = os.Getenv(topology.DirVariable)
	}
	dir, err := os.MkdirTemp(parent, "nginx-")
	if err != nil {
		return "", fmt.Errorf("make nginx directory: %w", err)
	}
	size := c.Size
	if size == 0 {
		size = len(c.Name) + 1
	}
	var listen strings.Builder
	for _, e := range endpoints {
		options := "backlog=16384"
		if e.addr.Addr().Is6() {
			options += " ipv6only=on"
		}
		fmt.Fprintf(&listen, "\t\tlisten %s %s;\n", e.addr, options)
	}
	err = errors.Join(
		os.Mkdir(dir+"/tmp", 0o755),
		os.Mkdir(dir+"/www", 0o755),
		os.WriteFile(dir+"/www/body", pad(c.Name, size), 0o644),
		os.WriteFile(dir+"/nginx.conf", fmt.Appendf(nil, nginxConf, dir, listen.String(), c.Name), 0o644),
	)
	if err != nil {
		os.RemoveAll(dir)
		return "", fmt.Errorf("write nginx files: %w", err)
	}
	return dir, nil
}

// checkFree returns an error if the port is in use.
func checkFree(ctx context.Context, listen string) error {
	open, err := listenAll(listen, func(e endpoint) (net.Listener, error) {
		var lc net.ListenConfig
		return lc.Listen(ctx, e.network("tcp"), e.addr.String())
	})
	closeAll(open)
	return err
}

// waitForPort waits until a server listens on the first address.
func waitForPort(ctx context.Context, endpoints []endpoint) bool {
	target := endpoints[0].addr.String()
	for ctx.Err() == nil {
		conn, err := net.DialTimeout("tcp", target, time.Second)
		if err == nil {
			conn.Close()
			return true
		}
		time.Sleep(5 * time.Millisecond)
	}
	return false
}
