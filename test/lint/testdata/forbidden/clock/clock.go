// Package clock stands for a third-party package.
package clock
