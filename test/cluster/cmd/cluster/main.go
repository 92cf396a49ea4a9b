// Command cluster starts and stops a real Kubernetes cluster on this machine.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"spillway.dev/spillway/test/cluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	images, _ := filepath.Glob("/tmp/w-cluster-images/*.tar")
	c, err := cluster.Up(ctx, cluster.Config{Name: "t1", Nodes: 1, Programs: "/tmp/w-cluster-bin", Images: images,
		Progress: func(s string) { fmt.Println(s) }})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("up")
	<-ctx.Done()
	if err := c.Down(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}
