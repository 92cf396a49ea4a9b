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
	name := os.Args[1]
	c, err := cluster.Up(ctx, cluster.Config{Name: name, Nodes: 3, Images: images, CNI: cluster.CNI(os.Args[2]),
		Chart: "/work/w-cluster/deploy/helm/spillway", Values: os.Args[3:],
		Progress: func(s string) { fmt.Println(s) }})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		fmt.Println("up")
	}
	<-ctx.Done()
	if c != nil {
		err = c.Down()
	} else {
		err = cluster.Down(name)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}
