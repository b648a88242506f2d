# Nightshift on Nomad: one group with all services but the executors, and a group for each kind of
# executor. What the cluster must have first (images, a host volume, a private network, the secret)
# stands in ../README.md.

variable "datacenters" {
  type        = list(string)
  default     = ["*"]
  description = "Where it may run."
}

variable "version" {
  type        = string
  default     = "0.1.0"
  description = "Tag of the images."
}

variable "registry" {
  type        = string
  default     = ""
  description = "Put before the images' names, with its slash; empty for images that nodes have."
}

variable "private_network" {
  type        = string
  default     = "private"
  description = "Host network of the nodes for the services' ports. What goes over it is not encrypted, so only the fleet and whoever may use it can be on it."
}

variable "simulated_executors" {
  type        = number
  default     = 1
  description = "Executors with made-up answers, to try things out."
}

variable "cuda_executors" {
  type        = number
  default     = 0
  description = "Executors with vLLM; each takes `gpus` GPUs."
}

variable "gpus" {
  type        = number
  default     = 1
  description = "GPUs of one executor; above 1, `engine_args` says how they are used."
}

variable "models" {
  type        = string
  default     = "smollm2-135m=HuggingFaceTB/SmolLM2-135M-Instruct"
  description = "NAME=PATH of the vLLM executors: what users ask for, and a folder or a name on Hugging Face."
}

variable "engine_args" {
  type        = string
  default     = ""
  description = "Go to vLLM unread, such as --tensor-parallel-size 2."
}

job "nightshift" {
  datacenters = var.datacenters
  type        = "service"

  # One task group shares one network, so that its services meet on loopback.
  group "services" {
    # More than one would be two stores on one SQLite database, which refuse each other.
    count = 1

    network {
      mode = "bridge"
      port "http" {
        to           = 8000
        host_network = var.private_network
      }
      port "grpc" {
        to           = 8001
        host_network = var.private_network
      }
      port "store" {
        to           = 7401
        host_network = var.private_network
      }
      port "nats" {
        to           = 4222
        host_network = var.private_network
      }
    }

    # Rows, blobs and JetStream's files; must belong to user 10001 on the node.
    volume "data" {
      type   = "host"
      source = "nightshift"
    }

    restart {
      attempts = 10
      interval = "5m"
      delay    = "5s"
      mode     = "delay"
    }

    service {
      name     = "nightshift"
      provider = "nomad"
      port     = "http"
      check {
        type     = "http"
        path     = "/readyz"
        interval = "5s"
        timeout  = "3s"
      }
    }

    service {
      name     = "nightshift-grpc"
      provider = "nomad"
      port     = "grpc"
      # Nomad's own checks speak http and tcp; gRPC's health service would need Consul.
      check {
        type     = "tcp"
        interval = "5s"
        timeout  = "3s"
      }
    }

    service {
      name     = "nightshift-store"
      provider = "nomad"
      port     = "store"
      check {
        type     = "tcp"
        interval = "5s"
        timeout  = "3s"
      }
    }

    service {
      name     = "nightshift-nats"
      provider = "nomad"
      port     = "nats"
      check {
        type     = "tcp"
        interval = "5s"
        timeout  = "3s"
      }
    }

    task "nats" {
      driver = "docker"
      config {
        image = "${var.registry}nightshift-nats:${var.version}"
        args  = ["--config", "/etc/nightshift/nats.conf", "--jetstream", "--store_dir", "/data/nats"]
        ports = ["nats"]
        # Where its configuration looks for them.
        volumes = ["secrets/nats:/run/secrets/nats:ro"]
        # The root file system is read only, and nothing gains rights.
        readonly_rootfs = true
        cap_drop        = ["all"]
        security_opt    = ["no-new-privileges"]
        pids_limit      = 512
        mount {
          type   = "tmpfs"
          target = "/tmp"
        }
      }
      template {
        data        = <<-EOT
          {{- with nomadVar "nomad/jobs/nightshift" }}
          store_password: "{{ .nats_store }}"
          scheduler_password: "{{ .nats_scheduler }}"
          executor_password: "{{ .nats_executor }}"
          operator_password: "{{ .nats_operator }}"
          {{- end }}
        EOT
        destination = "${NOMAD_SECRETS_DIR}/nats"
      }
      volume_mount {
        volume      = "data"
        destination = "/data"
      }
      resources {
        cpu    = 500
        memory = 256
      }
    }

    task "store" {
      driver = "docker"
      config {
        image = "${var.registry}nightshift-store:${var.version}"
        ports = ["store"]
        readonly_rootfs = true
        cap_drop        = ["all"]
        security_opt    = ["no-new-privileges"]
        pids_limit      = 512
        mount {
          type   = "tmpfs"
          target = "/tmp"
        }
      }
      template {
        data        = "{{ with nomadVar \"nomad/jobs/nightshift\" }}{{ .secret }}{{ end }}\n"
        destination = "${NOMAD_SECRETS_DIR}/nightshift"
      }
      template {
        data        = "{{ with nomadVar \"nomad/jobs/nightshift\" }}{{ .nats_store }}{{ end }}\n"
        destination = "${NOMAD_SECRETS_DIR}/nats-store"
      }
      env {
        NIGHTSHIFT_SECRET_FILE    = "${NOMAD_SECRETS_DIR}/nightshift"
        NIGHTSHIFT_NATS_PASSWORD_FILE = "${NOMAD_SECRETS_DIR}/nats-store"
        NIGHTSHIFT_NATS_URL       = "nats://127.0.0.1:4222"
        NIGHTSHIFT_STORE_DATA_DIR = "/data/store"
      }
      volume_mount {
        volume      = "data"
        destination = "/data"
      }
      kill_timeout = "20s"
      resources {
        cpu    = 1000
        memory = 512
      }
    }

    task "scheduler" {
      driver = "docker"
      config {
        image = "${var.registry}nightshift-scheduler:${var.version}"
        readonly_rootfs = true
        cap_drop        = ["all"]
        security_opt    = ["no-new-privileges"]
        pids_limit      = 512
        mount {
          type   = "tmpfs"
          target = "/tmp"
        }
      }
      template {
        data        = "{{ with nomadVar \"nomad/jobs/nightshift\" }}{{ .secret }}{{ end }}\n"
        destination = "${NOMAD_SECRETS_DIR}/nightshift"
      }
      template {
        data        = "{{ with nomadVar \"nomad/jobs/nightshift\" }}{{ .nats_scheduler }}{{ end }}\n"
        destination = "${NOMAD_SECRETS_DIR}/nats-scheduler"
      }
      env {
        NIGHTSHIFT_SECRET_FILE     = "${NOMAD_SECRETS_DIR}/nightshift"
        NIGHTSHIFT_NATS_PASSWORD_FILE = "${NOMAD_SECRETS_DIR}/nats-scheduler"
        NIGHTSHIFT_NATS_URL        = "nats://127.0.0.1:4222"
        NIGHTSHIFT_SCHEDULER_STORE = "127.0.0.1:7401"
      }
      kill_timeout = "20s"
      resources {
        cpu    = 500
        memory = 256
      }
    }

    # Until there is an API key it does not start, and is tried again: ../README.md says how to make one.
    task "gateway" {
      driver = "docker"
      config {
        image = "${var.registry}nightshift-gateway:${var.version}"
        ports = ["http", "grpc"]
        readonly_rootfs = true
        cap_drop        = ["all"]
        security_opt    = ["no-new-privileges"]
        pids_limit      = 512
        mount {
          type   = "tmpfs"
          target = "/tmp"
        }
      }
      template {
        data        = "{{ with nomadVar \"nomad/jobs/nightshift\" }}{{ .secret }}{{ end }}\n"
        destination = "${NOMAD_SECRETS_DIR}/nightshift"
      }
      env {
        NIGHTSHIFT_SECRET_FILE        = "${NOMAD_SECRETS_DIR}/nightshift"
        NIGHTSHIFT_GATEWAY_STORE = "127.0.0.1:7401"
      }
      kill_timeout = "20s"
      resources {
        cpu    = 1000
        memory = 512
      }
    }
  }

  group "executor-simulated" {
    count = var.simulated_executors

    network {
      mode = "bridge"
    }

    restart {
      attempts = 10
      interval = "5m"
      delay    = "5s"
      mode     = "delay"
    }

    task "executor" {
      driver = "docker"
      config {
        image = "${var.registry}nightshift-executor-simulated:${var.version}"
        init  = true
        readonly_rootfs = true
        cap_drop        = ["all"]
        security_opt    = ["no-new-privileges"]
        pids_limit      = 512
        mount {
          type   = "tmpfs"
          target = "/tmp"
        }
      }
      template {
        data        = "{{ with nomadVar \"nomad/jobs/nightshift\" }}{{ .secret }}{{ end }}\n"
        destination = "${NOMAD_SECRETS_DIR}/nightshift"
      }
      # Starts again when they move; what it ran then runs again.
      template {
        data        = <<-EOT
          {{- range nomadService "nightshift-nats" }}
          NIGHTSHIFT_NATS_URL=nats://{{ .Address }}:{{ .Port }}
          {{- end }}
          {{- range nomadService "nightshift-store" }}
          NIGHTSHIFT_EXECUTOR_STORE={{ .Address }}:{{ .Port }}
          {{- end }}
        EOT
        destination = "local/addresses.env"
        env         = true
      }
      template {
        data        = "{{ with nomadVar \"nomad/jobs/nightshift\" }}{{ .nats_executor }}{{ end }}\n"
        destination = "${NOMAD_SECRETS_DIR}/nats-executor"
      }
      env {
        NIGHTSHIFT_SECRET_FILE            = "${NOMAD_SECRETS_DIR}/nightshift"
        NIGHTSHIFT_NATS_PASSWORD_FILE     = "${NOMAD_SECRETS_DIR}/nats-executor"
        NIGHTSHIFT_EXECUTOR_NAME          = "simulated-${NOMAD_ALLOC_INDEX}"
        NIGHTSHIFT_EXECUTOR_MODELS        = "simulated"
        NIGHTSHIFT_EXECUTOR_DRAIN_SECONDS = "20"
      }
      # Nomad's clients allow 30 s unless told otherwise.
      kill_timeout = "30s"
      resources {
        cpu    = 1000
        memory = 512
      }
    }
  }

  group "executor-cuda" {
    count = var.cuda_executors

    network {
      mode = "bridge"
    }

    restart {
      attempts = 10
      interval = "30m"
      delay    = "15s"
      mode     = "delay"
    }

    # Fetched models and compiled kernels, gone with the allocation but kept over a new version.
    ephemeral_disk {
      size   = 100000
      sticky = true
    }

    task "executor" {
      driver = "docker"
      config {
        image    = "${var.registry}nightshift-executor-cuda:${var.version}"
        init     = true
        shm_size = 17179869184
        readonly_rootfs = true
        cap_drop        = ["all"]
        security_opt    = ["no-new-privileges"]
        pids_limit      = 8192
        mount {
          type   = "tmpfs"
          target = "/tmp"
        }
      }
      template {
        data        = "{{ with nomadVar \"nomad/jobs/nightshift\" }}{{ .secret }}{{ end }}\n"
        destination = "${NOMAD_SECRETS_DIR}/nightshift"
      }
      template {
        data        = <<-EOT
          {{- range nomadService "nightshift-nats" }}
          NIGHTSHIFT_NATS_URL=nats://{{ .Address }}:{{ .Port }}
          {{- end }}
          {{- range nomadService "nightshift-store" }}
          NIGHTSHIFT_EXECUTOR_STORE={{ .Address }}:{{ .Port }}
          {{- end }}
        EOT
        destination = "local/addresses.env"
        env         = true
      }
      template {
        data        = "{{ with nomadVar \"nomad/jobs/nightshift\" }}{{ .nats_executor }}{{ end }}\n"
        destination = "${NOMAD_SECRETS_DIR}/nats-executor"
      }
      env {
        NIGHTSHIFT_SECRET_FILE            = "${NOMAD_SECRETS_DIR}/nightshift"
        NIGHTSHIFT_NATS_PASSWORD_FILE     = "${NOMAD_SECRETS_DIR}/nats-executor"
        NIGHTSHIFT_EXECUTOR_NAME          = "cuda-${NOMAD_ALLOC_INDEX}"
        NIGHTSHIFT_EXECUTOR_MODELS        = var.models
        NIGHTSHIFT_EXECUTOR_ENGINE_ARGS   = var.engine_args
        NIGHTSHIFT_EXECUTOR_DRAIN_SECONDS = "20"
        HOME                              = "${NOMAD_ALLOC_DIR}/data"
        # Compiled kernels are loaded from it, which /tmp does not allow.
        TMPDIR = "${NOMAD_ALLOC_DIR}/tmp"
      }
      kill_timeout = "30s"
      resources {
        cpu    = 4000
        memory = 32768
        device "nvidia/gpu" {
          count = var.gpus
        }
      }
    }
  }
}
